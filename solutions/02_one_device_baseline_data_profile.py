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
# # 02 · One device: baseline, data, profile
#
# Before you train on many devices, make one of them work. A device that waits for data half of the time still waits
# half of the time when there are a hundred of them. In this lesson you take a training run that is several times slower
# than it should be, find out where its time goes, with a profiler that you write yourself and with PyTorch's, and
# remove what makes it wait.
#
# ## Goals
#
# - predict how long a step should take, and measure how long it does take;
# - write a timer that says where the time of a step goes, and know why such a timer is wrong on a GPU;
# - predict how many bytes are read for a sample, from the chunks of the file;
# - write a loader that reads ahead, and predict what that saves, and what more workers save;
# - read a trace: say how long the device computed, waited for data and was idle, and choose the cure from it;
# - name the parts of a step for a profiler, PyTorch's and NVIDIA's, and record one epoch only.
#
# **Time**: 169 minutes, and 24 more for what is optional. Good places for a break are after section 3 and after
# section 5.
#
# **Needs**: lesson 00 (sections 1 and 3). Nothing in this lesson is about several ranks.

# %%
import os
import statistics
import time

import torch

from course.lab import check, compare, plot
from course.labs import l02_by_hand, l02_weather
from labcode.config import ViTConfig
from labcode.models import vit

os.environ["KINETO_LOG_LEVEL"] = "6"  # the profiler's own log lines are left out
torch.set_num_threads(1)

# %% [markdown]
# All sections work on one training run, which the next cell sets up: run it wherever you begin. A small vision
# transformer (ViT) learns to predict the weather. From a part of the map, 60 by 60 degrees, it predicts what that part
# looks like six hours later. There are four variables: the temperature, two components of the wind, and the pressure.
# The file is made of the ERA5 sample that comes with the course, on a grid of 1 degree.
#
# `warm_up` trains on the first two batches. These steps are slower, because memory is allocated and libraries choose
# their routines, so no measurement counts them. Of 8 batches, `TIMED` are left.

# %%
torch.manual_seed(0)
batch_size = 8
TIMED = 6
model = vit.ViT(ViTConfig(num_variables=4, num_forcings=0, lat=60, lon=60))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
maps = l02_weather.make("runs/maps.zarr", chunks=(16, 180, 360))


def train_step(states, targets):
    optimizer.zero_grad()
    vit.loss(model(states), targets).backward()
    optimizer.step()

def warm_up(batches, num_steps=2):
    """Train on the first batches, and give the others back."""
    for _ in range(num_steps):
        train_step(*next(batches))
    return batches

# %% [markdown]
# ## 1. A baseline (core, 9 min)
#
# How long should a step take? Most of its work is matmuls. In forward, each weight is multiplied with a number of each
# token, and the result is added to a sum: 2 FLOPs. Backward does this twice, once for the gradient of the input and
# once for that of the weight. That makes 6 FLOPs for each weight and token: a step with N weights and T tokens takes
# about **6 N T** FLOPs.
#
# Our model has 0.84 million weights. It cuts a map of 60 by 60 into 144 patches of 5 by 5, and each patch is a token. A
# step has 8 such samples. `Crops` reads them from the file: `crops[indices]` gives a batch of states and of what
# follows them. PyTorch's `FlopCounterMode` counts the FLOPs of the matmuls that it sees.

# %%
from torch.utils.flop_counter import FlopCounterMode

crops = l02_weather.Crops(maps)
states, targets = crops[range(batch_size)]
with FlopCounterMode(display=False) as counter:
    train_step(states, targets)
print(f"counted: {counter.get_total_flops() / 1e9:.2f} GFLOP a step")
print(f"6 N T:   {6 * 0.84e6 * 144 * batch_size / 1e9:.2f} GFLOP")

# %% [markdown]
# It is a little less than 6 N T, since some of the weights, such as those of norms, are in no matmul, and the first
# layer needs no gradient of its input. The counter does not see the matmuls inside attention: on a CPU they are part of
# one fused operation for which it has no formula. labcode's `training_flops_per_sample` adds them: 6.6 GFLOP for a
# step. At the rate that a large matmul reaches on this machine (lesson 00, section 3), the matmuls alone would take
# this long:

# %%
from labcode.measure.device_speed import matmul_flops_per_s
from labcode.perf.flops import training_flops_per_sample

step_flops = batch_size * training_flops_per_sample(model.config)
flops_per_s = matmul_flops_per_s(torch.device("cpu"), torch.float32)
products_s = step_flops / flops_per_s
print(f"{step_flops / 1e9:.1f} GFLOP a step, {flops_per_s / 1e9:.0f} GFLOP/s")
print(f"the matmuls of a step: {1e3 * products_s:.0f} ms")

# %% [markdown]
# Now we measure whole steps, from one to the next, including the wait for each batch, and take the median.

# %% tags=["by-hand"]
def step_times(train_step, batches):
    """The seconds of each step, with the wait for its batch."""
    seconds = []
    started = time.perf_counter()
    for states, targets in batches:
        train_step(states, targets)
        now = time.perf_counter()
        seconds.append(now - started)
        started = now
    return seconds

# %%
batches = warm_up(l02_weather.batches(crops, batch_size, 8))
baseline_s = statistics.median(step_times(train_step, batches))
print(f"a step: {1e3 * baseline_s:.0f} ms, {batch_size / baseline_s:.0f} samples/s")
print(f"{baseline_s / products_s:.1f} times as long as the matmuls alone")

# %% [markdown]
# The step takes several times as long as its matmuls. So most of its time goes elsewhere, and the rest of this lesson
# is about where. Our measure from here on is **samples/s** at a fixed model and batch, which is called the
# **throughput**.
#
# **Takeaway: predict first. If a step takes several times as long as its FLOPs say, look for the reason.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Ask: why the median, and why do the first steps not count? (Memory is allocated, caches are
# filled, the libraries choose their kernels. A mean is moved by one hiccup.) On a busy machine both numbers move, the
# ratio less.

# %% [markdown]
# ## 2. A profiler from timers (core, 30 min)
#
# Where does the rest go? A **profiler** attributes time to parts of a program. The simplest one reads the clock when a
# part begins and when it ends. Two details make it trustworthy.
#
# - The parts have to add up to the whole step. Time outside every part is the **rest**. If it is large, you have
#   forgotten a part.
# - Parts can lie inside each other, such as communication inside backward (lesson 05, section 3). Then each moment must
#   count only once, for the **innermost** part that runs.
#
# For example: backward begins at 0 s, a communication inside it runs from 2 s to 6 s, backward ends at 9 s, and the
# step at 10 s. Then backward has 2 + 3 = 5 s, communication 4 s and the rest 1 s.

# %% tags=["figure"]
plot.timeline(
    [
        ("the step", "step", 0, 10),
        ("a part", "backward", 0, 9),
        ("a part inside", "communication", 2, 6),
        ("what counts", "backward", 0, 2),
        ("what counts", "communication", 2, 6),
        ("what counts", "backward", 6, 9),
        ("what counts", "rest", 9, 10),
    ],
    caption="02.innermost",
)

# %% [markdown] tags=["exercise"]
# ### Exercise 2.1 · Your own profiler
#
# Complete the class. It is used like this:
#
#     timer = StepTimer()
#     with timer.part("data"):
#         batch = next(batches)
#     timer.shares()          # {"data": 0.7, "rest": 0.3}
#
# - `part(name)` attributes the time of its block to `name`. If the same name comes again, its times add up.
# - In a part inside another one, time counts for the inner one alone.
# - A block that raises an error is counted like any other, the caller gets the error, and the timer works afterwards.
# - `shares()` gives each part's fraction of all the time since the timer was made, and `"rest"` for the time outside
#   every part. It is called when no part is open; without parts, `"rest"` is 1.
#
# Take the time from `self.clock()`. What else the object has to remember is up to you. `contextlib.contextmanager`
# makes a context of a function: what stands before `yield` happens at the beginning of the `with` block, what stands
# after it at the end.

# %% tags=["exercise", "by-hand"]
import contextlib


class StepTimer:
    """Attributes wall time to named parts of a step."""

    def __init__(self, clock=time.perf_counter):
        self.clock = clock
        ### BEGIN SOLUTION
        self.seconds = {}
        self.running = ["rest"]
        self.last = clock()

    def charge(self):
        now = self.clock()
        name = self.running[-1]
        self.seconds[name] = self.seconds.get(name, 0) + now - self.last
        self.last = now
        ### END SOLUTION

    @contextlib.contextmanager
    def part(self, name):
        """What runs in the block belongs to `name`."""
        ### BEGIN SOLUTION
        self.charge()
        self.running.append(name)
        try:
            yield
        finally:
            self.charge()
            self.running.pop()
        ### END SOLUTION

    def shares(self):
        """{name: its fraction of the time since the timer was made}, with "rest"."""
        ### BEGIN SOLUTION
        self.charge()
        total = sum(self.seconds.values())
        return {name: seconds / total for name, seconds in self.seconds.items()}
        ### END SOLUTION

# %% tags=["check"]
check("2.1", StepTimer)

# %% [markdown]
# Now our training run. `timed_steps` is its loop with four parts.

# %% tags=["by-hand"]
def timed_steps(timer, batches, model, optimizer):
    """A step for each batch, in four parts of the timer."""
    batches = iter(batches)
    while True:
        with timer.part("data"):
            batch = next(batches, None)
        if batch is None:
            return
        states, targets = batch
        with timer.part("forward"):
            loss = vit.loss(model(states), targets)
        with timer.part("backward"):
            optimizer.zero_grad()
            loss.backward()
        with timer.part("optimizer"):
            optimizer.step()

# %%
crops = l02_weather.Crops(maps)
batches = warm_up(l02_weather.batches(crops, batch_size, 8))
timer = l02_by_hand.StepTimer()
started = time.perf_counter()
timed_steps(timer, batches, model, optimizer)
step_s = (time.perf_counter() - started) / TIMED
for part, share in timer.shares().items():
    print(f"{part:10} {share:6.1%}   {1e3 * share * step_s:6.1f} ms a step")

# %% [markdown]
# Data is the largest part. Backward takes longer than forward, because it has twice the matmuls to do: one for the
# gradient of the input, one for that of the weight. It does not take exactly twice as long, since a step also has other
# operations, such as norms and activations. To see your own timer at work, write `StepTimer()` instead of
# `l02_by_hand.StepTimer()`.
#
# Forward, backward and the optimizer together still take longer than the matmuls alone. That part of the gap has
# nothing to do with data, and lesson 03, section 1, begins with it.
#
# **On a GPU such timers are wrong.** A line such as `model(states)` does not compute there. It **launches** kernels: it
# puts them into a queue and returns, and the GPU works through the queue later. So the timer sees how long launching
# takes, and the line that happens to wait for a result, often `loss.item()`, is charged for everything.

# %% tags=["figure"]
plot.timeline(
    [
        ("your timer", "forward", 0, 2),
        ("your timer", "backward", 2, 5),
        ("your timer", "loss.item()", 5, 31),
        ("GPU", "forward", 1, 10),
        ("GPU", "backward", 10, 30),
    ],
    caption="02.timer",
)

# %% [markdown]
# (The numbers of this picture are made up, since there is no GPU in this lesson.) There are two ways to get it right.
#
# - **Synchronize**: `torch.cuda.synchronize()` waits until the queue is empty. Call it before each look at the clock.
#   The times are right, but the GPU now waits for the next launch after each part, so the step gets slower. Use it for
#   a few steps.
# - **Events**: `event.record()` puts a mark into the queue, and the GPU notes the time when it gets there. Afterwards
#   `start.elapsed_time(stop)` gives the milliseconds between two marks, and nobody has to wait. labcode's training loop
#   does this, and the section on GPUs and SLURM shows it in plain PyTorch.
#
# **Takeaway: a timer whose parts add up to the step tells you where to look. On a GPU, take the times from the GPU.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Typical in 2.1: the outer part counts the inner one too (a difference of two clock readings), no
# `finally`, `=` instead of `+=`, and shares of the attributed time alone, which hides the rest. Ask: why is
# `zero_grad` in backward here, and does it matter? (It has to be in some part, else it is in the rest.)

# %% [markdown]
# ## 3. What is read for a sample (core, 20 min)
#
# Formats for large arrays, such as zarr and HDF5, cut an array into **chunks**, boxes of the same shape. A chunk is
# compressed and stored as one piece, so it can only be read and unpacked as a whole, whatever part of it is wanted.
#
# Our file has chunks of 16 time steps, 180 latitudes and 360 longitudes, which is the whole map. A sample takes 2 time
# steps and a crop of 60 by 60. The picture shows such a crop, rows 70 to 129 and columns 90 to 149, in our file and in
# one whose chunks are smaller.

# %% tags=["figure"]
plot.chunks(
    {"chunks of (16, 180, 360)": (180, 360), "chunks of (16, 60, 120)": (60, 120)},
    ((70, 130), (90, 150)),
    caption="02.crop",
)

# %% [markdown]
# On the right the crop lies in 2 chunks along latitude (rows 60 to 119 and 120 to 179) and in 2 along longitude
# (columns 0 to 119 and 120 to 239). Take time steps 5 and 6: both lie in the first chunk along time, which holds 0 to
# 15. So 1 · 2 · 2 = 4 chunks are read of each variable. Each has 16 · 60 · 120 numbers of 4 bytes, which makes 1.84 MB
# in all.
#
# Now take time steps 3 and 4, rows 100 to 159 and columns 30 to 89.
#
# **Predict.** How many bytes of chunks does this box touch, of one variable, with chunks of (2, 90, 180)? Chunks start
# at multiples of their length: along time at 0, 2, 4, ...

# %% tags=["predict"]
tile_bytes = 2 * 2 * 90 * 180 * 4  # time steps 2-3 and 4-5, rows 90-179, columns 0-179

# %% tags=["nbval-check-output"]
import math

tiles = l02_weather.make("runs/tiles.zarr", chunks=(2, 90, 180))


def chunk_bytes_of(path):
    """Bytes of the chunks that zarr asks its store for."""
    arrays, store = l02_weather.open_counted(path)
    temperature = arrays[0]
    temperature[3:5, 100:160, 30:90]
    return len(store.chunks) * math.prod(temperature.chunks) * 4

counted = chunk_bytes_of(tiles)
compare("with tiles", tile_bytes, counted, unit="B", within=1.01, found="counted")
print(f"with whole maps: {chunk_bytes_of(maps) / 1e6:.2f} MB")

# %% [markdown]
# The box itself has 2 · 60 · 60 · 4 = 28,800 bytes. Our file unpacks 144 times as much as is wanted, and one with tiles
# of (2, 90, 180) unpacks 9 times as much.

# %% [markdown] tags=["exercise"]
# ### Exercise 2.2 · Bytes of a box
#
# Write the rule as a function, for any number of axes. `box` has a pair (start, stop) for each axis, where `stop` is no
# longer in the box, as in a slice. `chunks` has the length of a chunk along each axis. A chunk counts in full, also at
# the edge of an array. Leave `box` as it is.

# %% tags=["exercise"]
def bytes_read(box, chunks, itemsize=4):
    """Bytes of all chunks that the box touches, before compression."""
    ### BEGIN SOLUTION
    num_chunks = 1
    for (start, stop), length in zip(box, chunks):
        first = start // length
        last = (stop - 1) // length
        num_chunks *= last - first + 1
    return num_chunks * math.prod(chunks) * itemsize
    ### END SOLUTION

# %% tags=["check"]
check("2.2", bytes_read)

# %% [markdown]
# The cure is to write the file again, with chunks that fit what is read. What does it change?

# %% tags=["figure"]
by_part = {"data": {}, "forward": {}, "backward": {}, "optimizer": {}}
for name, path in {"whole maps": maps, "tiles": tiles}.items():
    crops = l02_weather.Crops(path)
    batches = warm_up(l02_weather.batches(crops, batch_size, 8))
    timer = l02_by_hand.StepTimer()
    l02_by_hand.timed_steps(timer, batches, model, optimizer)
    for part, milliseconds in by_part.items():
        milliseconds[name] = 1e3 * timer.seconds[part] / TIMED
data_ms = by_part["data"]
print(f"data: {data_ms['tiles'] / data_ms['whole maps']:.2f} of the time")
plot.bars(by_part, caption="02.chunkings")

# %% [markdown]
# The bytes went down by a factor of 16 for this box, and the time by less. Each chunk is a request of its own, with a
# price that does not depend on its size: a file is opened, and Python has some work to do. So reading costs something
# for each request and something for each byte, as messages do (lesson 01, section 6). That is why chunks can also be
# too small: chunks of (1, 10, 10) would waste hardly a byte, but a sample would need at least 2 · 6 · 6 = 72 of them
# for each variable.
#
# Our files are small. On a file system that many nodes share, or in an object store, a request costs far more, and
# millions of small files are a burden for everybody. For such storage zarr's own guide advises chunks of at least a
# megabyte. For a sample that is smaller than that, you want small chunks with many of them in one file, which zarr
# calls a **shard**, from version 3 on: `create_array(..., chunks=..., shards=...)`.
#
# **Takeaway: a chunk is read whole. Choose chunks about as large as what a sample reads, and put small ones together
# in shards, so that files stay large.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Typical in 2.2: `stop // length` counts a chunk too many when the box ends where a chunk ends;
# rounding up the length of the box (`ceil(60 / 90)`) forgets where it begins. Ask: how would you cut a file from which
# whole maps are read, and one from which time series of a place are read? (There is no shape for both; some archives
# keep two copies.)

# %% [markdown]
# ## 4. Read ahead (core, 42 min)
#
# Reading and computing still take turns: while the next batch is read, nothing is computed. But batch 2 does not depend
# on what was computed with batch 1, so it can be read meanwhile. This is called **prefetching**. The picture shows four
# batches, each of which takes 30 ms to read and 50 ms to compute.

# %% tags=["figure"]
turns = []
for number in range(4):
    start = 80 * number
    turns.append(("in turns", f"read {number + 1}", start, start + 30))
    turns.append(("in turns", f"compute {number + 1}", start + 30, start + 80))
ahead = []
for number in range(4):
    ahead.append(("reader", f"read {number + 1}", 30 * number, 30 * number + 30))
for number in range(4):
    ahead.append(("loop", f"compute {number + 1}", 30 + 50 * number, 80 + 50 * number))

plot.timeline(turns + ahead, caption="02.reading")

# %% [markdown]
# In turns, this takes 4 · (30 + 50) = 320 ms. With a reader beside the loop, the loop waits 30 ms for the first batch.
# From then on the next batch is always there: 30 + 4 · 50 = 230 ms. Now reading takes 60 ms, and computing 50 ms as
# before.
#
# **Predict.** How many seconds do the four batches take with a reader that reads ahead?

# %% tags=["predict"]
read_ahead_s = 4 * 0.06 + 0.05  # the loop waits for each batch, then computes once

# %% [markdown]
# We try it with labcode's solution of the exercise below. Reading and computing just sleep here.

# %%
def slow_source(num_batches):
    for number in range(num_batches):
        time.sleep(0.06)
        yield number

started = time.perf_counter()
for _ in l02_by_hand.Prefetcher(slow_source(4), ahead=2):
    time.sleep(0.05)
measured_s = time.perf_counter() - started
compare("read ahead", read_ahead_s, measured_s, unit="s", within=1.1)

# %% [markdown]
# In turns it would be 440 ms. In the long run, a step takes max(read, compute) instead of read + compute.
#
# This takes a **thread** that reads, and a **queue** between the thread and the loop. `queue.Queue(n)` holds at most n
# items: `put(item)` waits while it is full, and `get()` waits while it is empty. The bound matters, since a reader that
# is faster than the loop would otherwise fill the memory with batches.
#
# Can two Python threads run at the same time? In the usual build of CPython only one of them can execute Python code at
# a time, because of the **GIL** (global interpreter lock), but the libraries that unpack chunks and multiply matrices
# release it while they work.

# %% [markdown] tags=["exercise"]
# ### Exercise 2.3 · A loader that reads ahead
#
# Complete the class. `for batch in Prefetcher(source, ahead)` gives what `for batch in source` gives, but `source` is
# read in a thread.
#
# - The order is kept, and a batch may be any object, also `None`.
# - At most `ahead` batches wait in the queue. (The thread may hold one more, which it wants to put there.)
# - If `source` raises an exception, the loop first gets the batches before it, and then this very exception.
# - When the loop is over, no thread is left: not at the end, not after an error, and not after a `break`. At that moment
#   the thread may be waiting for room in the queue, with a batch, an error or the end marker.
# - The loop may be slow, and so may the source: neither gives up after some time.
# - A `Prefetcher` can be looped over again, and each loop begins anew.
#
# `ready.put(item, timeout=0.05)` raises `queue.Full` if there is no room after 0.05 s. `stopped.set()` and
# `stopped.is_set()` tell the other side. The check takes some 10 seconds: it also waits until your queue is full.
#
# How does a generator learn of a `break`? The `for` loop held the only reference to it, so CPython deletes it, and
# thereby closes it: the `finally` around its `yield` runs. If you keep a reference, as in `loop = iter(prefetcher)`,
# call `loop.close()`, or the thread lives on.

# %% tags=["exercise", "by-hand"]
import queue
import threading


class Prefetcher:
    """What `source` yields, read ahead by a thread."""

    def __init__(self, source, ahead):
        self.source = source
        self.ahead = ahead

    def __iter__(self):
        ready = queue.Queue(maxsize=self.ahead)
        stopped = threading.Event()
        reader = threading.Thread(target=self.read, args=(ready, stopped), daemon=True)
        ### BEGIN SOLUTION
        reader.start()
        try:
            while True:
                kind, content = ready.get()
                if kind == "end":
                    return
                if kind == "error":
                    raise content
                yield content
        finally:
            stopped.set()
            reader.join()
        ### END SOLUTION

    def read(self, ready, stopped):
        """In the thread: put what `source` yields into the queue."""
        ### BEGIN SOLUTION
        try:
            for batch in self.source:
                self.put(ready, ("batch", batch), stopped)
                if stopped.is_set():
                    return
            self.put(ready, ("end", None), stopped)
        except Exception as error:
            self.put(ready, ("error", error), stopped)

    def put(self, ready, item, stopped):
        while not stopped.is_set():
            try:
                ready.put(item, timeout=0.05)
                return
            except queue.Full:
                continue
        ### END SOLUTION

# %% tags=["check"]
check("2.3", Prefetcher)

# %% [markdown]
# What does it save for our training run? We take both files, the one with whole maps and the one with the tiles of
# section 3, and read each of them in turns and ahead. The cell takes some 20 seconds.

# %%
tiles = l02_weather.make("runs/tiles.zarr", chunks=(2, 90, 180))
step_s = {}
for name, path in {"whole maps": maps, "tiles": tiles}.items():
    crops = l02_weather.Crops(path)
    for way in ("in turns", "read ahead"):
        step_s[name, way] = []
    for _ in range(3):
        batches = warm_up(l02_weather.batches(crops, batch_size, 8))
        step_s[name, "in turns"] += l02_by_hand.step_times(train_step, batches)
        batches = l02_weather.batches(crops, batch_size, 8)
        batches = warm_up(iter(l02_by_hand.Prefetcher(batches, ahead=2)))
        step_s[name, "read ahead"] += l02_by_hand.step_times(train_step, batches)

for (name, way), seconds in step_s.items():
    median_s = statistics.median(seconds)
    print(f"{name:10} {way:10} {1e3 * median_s:4.0f} ms a step", end=", ")
    print(f"{batch_size / median_s:4.0f} samples/s")

# %% [markdown]
# Both cures together double the throughput or more. With reading ahead a step cannot be shorter than max(read, compute),
# and it may be longer, although reading and computing each have a core. One suspect is the GIL, which the reader needs
# for the parts of zarr that are written in Python. Section 5 puts it to the test: there another process reads, with a
# GIL of its own. When the loop computes on a GPU, its own core is nearly idle, so there is room for a reader.
#
# To see your own class at work, write `Prefetcher` instead of `l02_by_hand.Prefetcher` in the cell, and run it again.
#
# **Takeaway: a loader that reads ahead hides the shorter of reading and computing behind the longer one.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Typical in 2.3: `None` as the mark of the end; an error that only ends the thread, so that the
# loop waits for ever; a thread that waits in `put` after a `break`, and a `join` that waits for it; an unbounded queue.
# Ask: what would `ahead=100` cost? (100 batches of memory, and nothing is gained if reading is the slower of the two.)

# %% [markdown]
# ## 5. More workers (core, 16 min)
#
# If reading is slower than computing, one reader is not enough. Loaders therefore have **workers**: w processes, each
# of which reads other batches. Processes do not share a GIL, so Python code runs at the same time as well. Together
# they deliver a batch every read/w seconds. So a step takes
#
# $$\text{step} = \max\left(\frac{\text{read}}{w},\ \text{compute}\right)$$
#
# In PyTorch this is a `DataLoader` with `num_workers`. Each worker reads up to `prefetch_factor` batches ahead, and with
# `persistent_workers` the processes are kept from one epoch to the next.
#
# NERSC has published the log of such a training run: a ViT on ERA5, one A100, 16 samples a step, four epochs of 512
# samples. Without workers the last epoch runs at 8.8 samples/s, and with four workers at 12.6. In the trace of the run
# with four, the gaps between the steps are gone. So computing takes 16/12.6 = 1.27 s, and reading is what the step
# without workers needs besides: 16/8.8 - 1.27 = 0.55 s.
#
# **Predict.** They tried 8 and 16 workers as well. How many samples/s does each of these runs reach in its last epoch?
# And how many does the run with 16 workers reach in its first?

# %% tags=["predict"]
last_epoch_of_8 = 12  # computing is the slower side already, so nothing is gained
last_epoch_of_16 = 11  # nor here, and 16 processes are not free
first_epoch_of_16 = 8  # 16 processes have to be started

# %% tags=["nbval-check-output"]
from course.labs.l03_step import NERSC_BY_WORKERS

of_8 = NERSC_BY_WORKERS[8]
of_16 = NERSC_BY_WORKERS[16]
how = {"within": 1.1, "unit": "samples/s", "found": "published"}
compare("8 workers, last epoch", last_epoch_of_8, of_8[-1], **how)
compare("16 workers, last epoch", last_epoch_of_16, of_16[-1], **how)
compare("16 workers, first epoch", first_epoch_of_16, of_16[0], **how)

# %% tags=["figure"]
first_epoch = [epochs[0] for epochs in NERSC_BY_WORKERS.values()]
last_epoch = [epochs[-1] for epochs in NERSC_BY_WORKERS.values()]
plot.lines(
    {
        "first epoch": (list(NERSC_BY_WORKERS), first_epoch),
        "last epoch": (list(NERSC_BY_WORKERS), last_epoch),
    },
    caption="02.nersc_workers",
)

# %% [markdown]
# The formula knows no reason why 8 or 16 workers should be slower than 4: it says 12.6 samples/s for all of them. The
# log says 12.1 and 10.6, and the first epoch of 16 workers is slower than the one without any. A worker costs
# something that read/w leaves out. The first epoch contains the start of 16 processes. Why the later ones are slower
# as well, the document does not say; it names the overhead of processes, compared with threads, as a limit of
# PyTorch's loader. In the code as published, `persistent_workers` is commented out, so there each epoch starts its
# processes anew. By the times in the log the runs with 8 and 16 workers took place in the same minutes, so they may
# also have disturbed each other. What can be measured here is what workers do to the loop beside them.
#
# Reading that waits for a network needs no core, but reading that unpacks chunks does. A step then needs read + compute
# seconds of processor time, and c cores deliver these in (read + compute)/c at best. So for w of at least 1
#
# $$\text{step} \geq \max\left(\frac{\text{read}}{w},\ \text{compute},\ \frac{\text{read} + \text{compute}}{c}\right)$$
#
# For example, reading takes 300 ms and computing 200 ms on two cores. With one worker the step takes at least
# max(300, 200, 250) = 300 ms, and with two or more at least 250 ms. **When computing is done by a GPU**, the third term
# is read/c alone, since the cores do little but read.
#
# We measure it with our file and labcode's `Loader`, which starts PyTorch's `DataLoader`. `take(step)` gives the batch
# of a step, and notes in `waited_s` how long it has kept the loop waiting. Workers have read ahead before the loop
# begins, so the first 8 steps do not count. Without a worker, reading and computing take turns, and this run also tells
# how long each of them takes. Before the workers, the thread of section 4 reads the same file. The cell takes half a
# minute.
#
# **Predict.** One thread shares the GIL with the loop, and one worker does not. How many times as long as with the
# thread does a step take with the worker: 1 if the GIL is not what keeps the loop waiting, and 0.8 or less if it is?

# %% tags=["predict"]
worker_against_thread = 1.0

# %% tags=["figure"]
from labcode.config import LoaderConfig
from labcode.data.loader import Loader
from labcode.data.sampler import Batches
from labcode.runtime import hardware

num_timed = 11  # of 19 steps: 8 warm up
cores = len(hardware.usable_cores())
crops = l02_weather.Crops(maps)
sampler = Batches(len(crops), batch_size)
measured_s = {}
start_s = {}
computing_ms = {}

ahead = l02_by_hand.Prefetcher(l02_weather.batches(crops, batch_size, 19), ahead=2)
batches = warm_up(iter(ahead), num_steps=8)
timer = l02_by_hand.StepTimer()
l02_by_hand.timed_steps(timer, batches, model, optimizer)
thread_s = sum(timer.seconds.values()) / num_timed

for workers in (0, 1, 2, 4):
    with Loader(crops, sampler, config=LoaderConfig(workers=workers)) as loader:
        loader.take(0)
        start_s[workers] = loader.waited_s
        batches = warm_up((loader.take(step)[0] for step in range(1, 20)), num_steps=8)
        timer = l02_by_hand.StepTimer()
        l02_by_hand.timed_steps(timer, batches, model, optimizer)
        measured_s[workers] = sum(timer.seconds.values()) / num_timed
        waited_s = timer.seconds["data"] / num_timed
        computing_ms[workers] = round(1e3 * (measured_s[workers] - waited_s))
    if workers == 0:
        read_s = waited_s
        compute_s = measured_s[0] - read_s

bound_s = {}
for workers in (1, 2, 4):
    bound_s[workers] = max(read_s / workers, compute_s, (read_s + compute_s) / cores)
ratio = measured_s[1] / thread_s
compare("1 worker, against the thread", worker_against_thread, ratio, within=1.2)
print("ms of computing in a step, by workers:", computing_ms)
print("seconds until the first batch:", {w: round(s, 1) for w, s in start_s.items()})
plot.lines(
    {
        "measured": (list(measured_s), [1e3 * one for one in measured_s.values()]),
        "the bound": (list(bound_s), [1e3 * one for one in bound_s.values()]),
    },
    caption="02.workers",
)

# %% [markdown]
# One worker, with a GIL of its own, is about as fast as the thread or a little faster. So with this file the GIL can
# explain only a small part of a step. Where the printed milliseconds of computing are larger with workers than without,
# forward and backward themselves got slower meanwhile. The comparison cannot say what they had to share: a core, the
# caches or the memory.
#
# Workers take the reading out of the loop, and more of them than cores add nothing. The bound is computed from the read
# and compute times of the run without workers. What the formula leaves out makes steps longer:
#
# - each batch has to get from the worker to the loop. PyTorch puts it into shared memory, which on Linux lies in
#   `/dev/shm`;
# - more processes than cores take turns, and each turn costs time and empties caches;
# - workers have to be **started**: the time until the first batch with one worker contains an interpreter that imports
#   PyTorch. labcode keeps it as a server from which all workers are forked, so that the later ones start faster.
#   PyTorch's `DataLoader` starts its workers anew in each epoch, unless `persistent_workers` is on;
# - each worker has its own memory: its own copy of what the dataset holds, and `prefetch_factor` batches.
#
# On a cluster, the ranks of a node share its cores. With 64 cores and 8 GPUs there are c = 8 for each rank: one for the
# loop, and 7 for its workers. `len(os.sched_getaffinity(0))` says how many cores SLURM gave to the process;
# `os.cpu_count()` says how many the node has.
#
# **Takeaway: take as many workers as make read/w smaller than compute, and never more than the cores that the loop
# leaves.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Ask: with `nproc` cores and four ranks on this node, how many workers for each rank?

# %% [markdown]
# ## 6. PyTorch's profiler (core, 40 min)
#
# Your timer knows the parts that you named. PyTorch's profiler also records every single operation, on the CPU and on a
# GPU. It writes a **trace**: a list of events, each with a name, a start and a stop. How do you get from such a list to
# "the device waited for data half of the time"? Here is a step of 20 ms on a GPU that uses two queues:

# %% tags=["figure"]
events = [  # name, start and stop in ms
    ("data", 0, 7),
    ("copy", 6, 8),
    ("forward", 8, 12),
    ("backward", 13, 18),
    ("all-reduce", 15, 19),
]
lanes = {"data": "the loop", "all-reduce": "GPU, queue 2"}
rows = [("the step", "step", 0, 20)]
for name, start, stop in events:
    rows.append((lanes.get(name, "GPU, queue 1"), name, start, stop))
plot.timeline(rows, caption="02.trace")

# %% [markdown]
# (The copy brings the first half of the batch to the GPU, while the loop still waits for the second.) Each moment of
# the step belongs to one of three classes. The device is **busy** if any operation runs on it, the copy and the
# all-reduce included. If the loop waits for data while nothing runs on the device, the step **waits for data**. A wait
# during which the device is busy costs nothing. All other moments are **idle**: the device has nothing to do, and data
# is not the cause.
#
# Durations must not be added up. Backward and the all-reduce take 5 + 4 = 9 ms, but together they last only 6 ms, from
# 13 to 19. What counts is the **union** of the intervals. So in these 20 ms the device is busy for 12, from 6 to 12 and
# from 13 to 19. The step waits for data for 6, from 0 to 6, since from then on something is copied. It is idle for 2,
# from 12 to 13 and from 19 to 20.
#
# One thing this rule cannot see: a copy counts as busy, so a step that only waits for its copies looks fully busy,
# although nothing is computed. When nearly all of a step is busy, ask next how much of that is computing.

# %% [markdown] tags=["exercise"]
# ### Exercise 2.4 · Where the time went
#
# Write this analysis. `events` is a list of (name, start, stop), in any order. The event `"data"`, which may occur
# several times, is a wait of the loop; every other event is an operation on the device. All of them lie between 0 and
# `step`, where the step ends. Operations may overlap, touch, or lie inside one another.
#
# - `covered(spans)` is a helper, which you may use or not: how long at least one of the spans runs. Each span is a pair
#   (start, stop).
# - `where_time_went(events, step)` returns a dictionary with `"busy"`, `"data"` and `"idle"`, which add up to `step`.
#   Leave `events` as it is.

# %% tags=["exercise", "by-hand"]
def covered(spans):
    """How long at least one of the spans (start, stop) runs."""
    ### BEGIN SOLUTION
    total = 0
    until = 0
    for start, stop in sorted(spans):
        start = max(start, until)
        if stop > start:
            total += stop - start
            until = stop
    return total
    ### END SOLUTION


def where_time_went(events, step):
    """{"busy", "data", "idle"}: how much of the step each of them takes."""
    ### BEGIN SOLUTION
    everything = [(start, stop) for name, start, stop in events]
    on_device = [(start, stop) for name, start, stop in events if name != "data"]
    busy = covered(on_device)
    busy_or_data = covered(everything)
    return {"busy": busy, "data": busy_or_data - busy, "idle": step - busy_or_data}
    ### END SOLUTION

# %% tags=["check"]
check("2.4", where_time_went)

# %% [markdown]
# Now a real trace. A profiler does not know what "forward" is: you have to tell it where such a part begins and ends.
# In PyTorch's profiler a named part is a `record_function`, which is a context. NVIDIA's profiler has two calls of its
# library NVTX instead, `torch.cuda.nvtx.range_push(name)` and `torch.cuda.nvtx.range_pop()`. The next cell makes two
# functions of the same kind for PyTorch's profiler, so that the same loop serves both.

# %%
from torch.profiler import record_function

open_ranges = []


def push(name):
    """Begin a part of the profile."""
    open_ranges.append(record_function(name))
    open_ranges[-1].__enter__()

def pop():
    """End the part that was begun last."""
    open_ranges.pop().__exit__(None, None, None)

# %% [markdown] tags=["exercise"]
# ### Exercise 2.5 · Name the parts
#
# This is a step without names:
#
#     states, targets = next(batches)
#     loss = vit.loss(model(states), targets)
#     loss.backward()
#     optimizer.step()
#     optimizer.zero_grad()
#     return loss
#
# Write it with four parts, `"data"`, `"forward"`, `"backward"` and `"optimizer"`. Each begins with `push(name)` and ends
# with `pop()`, and no part lies inside another.

# %% tags=["exercise", "by-hand"]
def marked_step(batches, model, optimizer, push, pop):
    """One step of training, in four parts of the profile; returns the loss."""
    ### BEGIN SOLUTION
    push("data")
    states, targets = next(batches)
    pop()
    push("forward")
    loss = vit.loss(model(states), targets)
    pop()
    push("backward")
    loss.backward()
    pop()
    push("optimizer")
    optimizer.step()
    optimizer.zero_grad()
    pop()
    return loss
    ### END SOLUTION

# %% tags=["check"]
check("2.5", marked_step)

# %% [markdown]
# A whole training run is too much to look at. We train for two epochs of three steps with each of the two files, and
# record only the last one, between `start()` and `stop()`. The first one warms up. The name `ProfilerStep#n` marks a
# step for the tools that read the recording.

# %%
from torch.profiler import ProfilerActivity, profile

from labcode.perf.chrome_trace import read
from labcode.perf.summary import summary
from labcode.runtime import launch


def record_last(epochs):
    """A trace of the last epoch; each is three batches."""
    recorder = profile(activities=[ProfilerActivity.CPU])
    for number, batches in enumerate(epochs, 1):
        if number == len(epochs):
            recorder.start()
        for step in range(3):
            push(f"ProfilerStep#{step}")
            l02_by_hand.marked_step(batches, model, optimizer, push, pop)
            pop()
    recorder.stop()
    return read(recorder)

tiles = l02_weather.make("runs/tiles.zarr", chunks=(2, 90, 180))
by_file = {}
for name, path in {"ViT, whole maps": maps, "ViT, tiles": tiles}.items():
    crops = l02_weather.Crops(path)
    epochs = [l02_weather.batches(crops, batch_size, 3) for _ in range(2)]
    by_file[name] = record_last(epochs)
print(summary(by_file["ViT, whole maps"], rows=6))

# %% [markdown]
# From the top:
#
# - the **breakdown**, by the rule of your exercise. Communication that nothing hides is shown apart from computing. On
#   a CPU the reading itself consists of operations, so all of "data" counts as waiting there;
# - the parts of the loop, somewhat longer than by your timer, since recording takes time itself;
# - the operations with the most **self time**, which is the time in an operation without those that it calls. `addmm`
#   and `mm` are matmuls;
# - the **recommendation**, which comes from these fractions by fixed rules. The rules see that the loop waits for data,
#   but not that most of the bytes that are read are thrown away. You found that in section 3, and curing it costs no
#   worker.
#
# In a long run nobody stands by to call `start()` and `stop()`. There the profiler takes a **schedule** and counts steps
# by itself when the loop calls `step()`. `wait` steps are not watched. `warmup` steps are watched and thrown away, since
# the first ones after the start are slower than usual. `active` steps are kept and given to `on_trace_ready`. All this
# happens `repeat` times; 0 means until the loop ends.

# %%
from torch.profiler import schedule

kept = []

def keep(recorder):
    names = {event.name for event in read(recorder).events}
    kept.extend(sorted(name for name in names if name.startswith("ProfilerStep")))

plan = schedule(wait=4, warmup=1, active=2, repeat=1)
batches = l02_weather.batches(l02_weather.Crops(maps), batch_size, 10)
with profile(
    activities=[ProfilerActivity.CPU], schedule=plan, on_trace_ready=keep
) as recorder:
    for _ in range(10):
        l02_by_hand.marked_step(batches, model, optimizer, push, pop)
        recorder.step()
print("what it does:", *[plan(step).name for step in range(10)])
print("kept:", kept)

# %% [markdown]
# Of ten steps it keeps 5 and 6. On a cluster `keep` would write the file of its rank, with
# `recorder.export_chrome_trace(path)`.
#
# Now the same for another training run: the small GPT on text of lesson 00, whose data is a row of characters in
# memory. A run of labcode records steps with `--profile.steps`.

# %% tags=["figure"]
done = launch.run(
    "labcode.train", "gpt_tiny", "--train.steps", 8, "--profile.steps", "4:7",
    "--train.out", "runs/gpt", "--train.overwrite", nproc=1, echo=False,
    env_extra={"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
)
by_gpt = read("runs/gpt")
plot.step_breakdown({**by_file, "GPT on text": by_gpt}, caption="02.three_runs")

# %% [markdown]
# For the GPT more workers would change nothing, since there is no data to wait for. Its time goes into computing itself,
# and into the many small operations of a small model, which are the subject of lessons 03 and 03b. (The few percent of
# communication come from a group with a single rank: labcode calls the same collectives then.)
#
# A recorded run can be opened in [Perfetto](https://ui.perfetto.dev), which shows each operation of the file under
# `runs/gpt/profile` on a timeline. Look for gaps there: on the track of a GPU a gap is a time in which it was not busy,
# and the track of the loop's thread shows what the loop did meanwhile. For the traces of many GPUs there is HTA
# (Holistic Trace Analysis). For each rank it splits the time of the GPU into computing, communication and memory copies,
# and idle time, so it shows when a step is bound by its copies. TensorBoard's tab for profiles is deprecated.
#
# **Takeaway: profile before you change anything. What cures one training run does nothing for another.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Open a trace in Perfetto in front of the class. Recording slows a step down, so read shares from
# a profile, and samples/s from a run without it. Typical in 2.4: durations are added up; a short event inside a long
# one ends the long one; "data" is counted while the device is busy. In 2.5: a
# `pop()` is left out, and every later part lies inside an earlier one.

# %% [markdown]
# ## 7. Broken on purpose (core, 4 min)
#
# One sample of this dataset is damaged. It is read by a worker, in another process. What does the loop get? The worker
# is forked here, so that the demonstration begins at once. For a training run, prefer `"forkserver"`, which is Python's
# own choice on Linux from 3.14 on: a fork of a process with threads can hang, and on macOS it can crash.

# %% tags=["raises-exception"] raises="ValueError: Caught ValueError in DataLoader worker process 0."
from torch.utils.data import DataLoader

damaged = DataLoader(
    l02_weather.Damaged(), batch_size=4, num_workers=1, multiprocessing_context="fork"
)
for number, batch in enumerate(damaged):
    print("batch", number, "has", len(batch), "samples")

# %% [markdown]
# PyTorch does what you did in exercise 2.3: the error travels through the queue, and the loop gets it instead of the
# batch. Read such a message from its **end**: the last line is the error of the dataset, and above it is the
# traceback of the worker. Two other messages are about memory:
#
# - "DataLoader worker (pid 123) is killed by signal: Killed": the machine ran out of memory. Use fewer workers, or
#   less prefetch.
# - "DataLoader worker (pid 123) is killed by signal: Bus error. It is possible that dataloader's workers are out of
#   shared memory": the batches of the workers no longer fit into `/dev/shm`. Containers often have only 64 MB of it;
#   start them with more (`docker run --shm-size=8g`, or `--ipc=host`), or use fewer workers or less prefetch.

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Ask: why do batches 0 and 1 still come? (The queue is in order, and the error stands in the
# place of batch 2.)

# %% [markdown]
# ## 8. Open end: find what makes it slow (optional, 20 min)
#
# This training run works on one crop a step, with a small network. It is much slower than it should be.

# %%
from torch.profiler import ProfilerActivity, profile

from course.labs import l02_job


def slow_training(job, num_steps):
    """(step, loss, validation) of every fifth step."""
    log = []
    for step in range(num_steps):
        mean, std = job.statistics()
        top, left = job.place(step)
        rows = slice(top, top + 60)
        columns = slice(left, left + 60)
        state = ((job.read_map(step) - mean) / std)[:, rows, columns]
        target = ((job.read_map(step + 1) - mean) / std)[:, rows, columns]
        loss = job.train_on(state, target)
        assert job.weights_are_finite()
        validation = job.validate(mean, std)
        if (step + 1) % 5 == 0:
            log.append((step, loss, validation))
    return log

tiles = l02_weather.make("runs/tiles.zarr", chunks=(2, 90, 180))
job = l02_job.Job(tiles)
with profile(activities=[ProfilerActivity.CPU]) as recorded:
    slow_training(job, 5)
for event in sorted(recorded.key_averages(), key=lambda event: -event.cpu_time_total):
    if event.key in job.counts:
        total_ms = event.cpu_time_total / 1e3
        print(f"{event.key:20} {total_ms:8.1f} ms {event.count:4} calls")

# %% [markdown] tags=["exercise"]
# ### Exercise 2.6 · Open end: the same training run, faster
#
# Write `faster_training`, which gives the same log and the same weights. The table above tells you where to begin:
# there are three things to cure. Besides what the slow one calls, a job has `job.read_crop(time, place)`, where `place`
# is what `job.place(step)` returns. It gives that part of one map, [variables, 60, 60], not normalised. The rubric of
# the check:
#
# 1. The weights and the log are those of the slow run, after any number of steps.
# 2. What does not change is computed once. What nobody looks at is not computed, and what is not used is not read.
# 3. The guard of the run is still there: when a weight is no longer a finite number, the same step ends in an error.
#
# The check counts calls. It runs the slow one too, so it takes some 10 seconds.

# %% tags=["exercise"]
def faster_training(job, num_steps):
    """(step, loss, validation) of every fifth step."""
    ### BEGIN SOLUTION
    log = []
    mean, std = job.statistics()
    for step in range(num_steps):
        place = job.place(step)
        state = (job.read_crop(step, place) - mean) / std
        target = (job.read_crop(step + 1, place) - mean) / std
        loss = job.train_on(state, target)
        assert job.weights_are_finite()
        if (step + 1) % 5 == 0:
            log.append((step, loss, job.validate(mean, std)))
    return log
    ### END SOLUTION

# %% tags=["check"]
check("2.6", faster_training)

# %% [markdown] tags=["solution-only"]
# *For the instructor.* For those who have time. People remove `weights_are_finite`, because it looks expensive; the
# table says that it is not. Others call it and do not look at what it says. Others validate in the wrong place, before
# the step. For those who go on: read ahead with the class of exercise 2.3, and measure.

# %% [markdown]
# ## 9. The copy on a stream of its own (optional, 4 min)
#
# On a GPU a batch has to be copied before it is used. With four workers, this copy is what NERSC sees next in its trace:
# it runs in the same queue as the kernels, so nothing is computed meanwhile. A queue of the GPU is called a **stream**,
# and work in different streams may run at the same time. This class starts the copy of the next batch on a stream of
# its own before it hands over the present one.

# %% tags=["by-hand"]
class CopiedAhead:
    """The batches of `source` on a device; the next one is copied meanwhile."""

    def __init__(self, source, device):
        self.source = source
        self.device = torch.device(device)
        self.stream = None  # a CPU has no streams, and there is nothing to copy
        if self.device.type == "cuda":
            self.stream = torch.cuda.Stream(self.device)

    def __iter__(self):
        batches = iter(self.source)
        coming = self.start_copy(batches)
        while coming is not None:
            batch = coming
            if self.stream is not None:
                kernels = torch.cuda.current_stream(self.device)
                kernels.wait_stream(self.stream)  # for this copy: the next is not begun
                for tensor in batch:
                    tensor.record_stream(kernels)
            coming = self.start_copy(batches)
            yield batch

    def start_copy(self, batches):
        batch = next(batches, None)
        if batch is None:
            return None
        with torch.cuda.stream(self.stream):
            return [tensor.to(self.device, non_blocking=True) for tensor in batch]

# %% tags=["nbval-check-output"]
crops = l02_weather.Crops(maps)
batches = l02_weather.batches(crops, batch_size, 3)
for states, _ in l02_by_hand.CopiedAhead(batches, "cpu"):
    print(states.device, list(states.shape))

# %% [markdown]
# Three of its lines matter on a GPU:
#
# - `wait_stream` makes the kernels of the loop wait for the copies that are in the other stream at this moment. It is
#   called before the next copy is started. One line later, each step would wait for the copy of the next batch as well.
# - `record_stream` tells PyTorch's allocator that the kernels use memory that was allocated in the other stream.
#   Without it the memory could be given to a later copy while a kernel still reads it.
# - `non_blocking=True` needs pinned memory. The `DataLoader` of the next section has `pin_memory=True`.
#
# Here, on a CPU, it only passes the batches on. It has not been timed for this lesson. labcode's own version,
# `data.copy_ahead.CopyAhead`, does the same in a thread, so that the loop does not wait for the reader either.

# %% [markdown]
# ## From here to GPUs and SLURM (core, 5 min)
#
# | where | start |
# |---|---|
# | a file of any size to try loaders on | `python -m labcode.data.generate big.zarr --gb 2` |
# | 4 workers, crops, steps 10 to 12 recorded | `python -m labcode.train vit_tiny --data.path big.zarr --data.crop 60 60 --loader.workers 4 --profile.steps 10:13` |
# | what the recording says | `python -m labcode.measure.profile runs/vit_tiny-001` |
# | a GPU: copies that overlap with computing | add `--loader.pin_memory` |
# | SLURM: cores for the loop and its workers | `#SBATCH --cpus-per-task=8`, and `--loader.workers 7` at most |
#
# In plain PyTorch, a loop on a GPU looks like this:
#
# ```python
# loader = DataLoader(
#     dataset,
#     batch_size=8,
#     num_workers=7,            # the cores of this rank, without the one of the loop
#     prefetch_factor=2,        # batches that each worker reads ahead
#     persistent_workers=True,  # not started anew in each epoch
#     pin_memory=True,          # batches lie where the GPU can copy from by itself
# )
# start = torch.cuda.Event(enable_timing=True)
# stop = torch.cuda.Event(enable_timing=True)
# for states, targets in loader:
#     states = states.to("cuda", non_blocking=True)  # queued: the loop does not wait
#     targets = targets.to("cuda", non_blocking=True)
#     start.record()
#     vit.loss(model(states), targets).backward()
#     stop.record()
#     optimizer.step()
#     optimizer.zero_grad()
# torch.cuda.synchronize()  # the last events have happened
# print(start.elapsed_time(stop), "ms of forward and backward in the last step")
# ```
#
# Memory is **pinned** if the operating system never moves it. Only from there can the GPU copy while the loop goes on;
# from other memory, `non_blocking=True` has no effect. The copy above waits in the same queue as the kernels. Section 9
# gives it a queue of its own, and labcode does so with `--loader.pin_memory`.
#
# For GPUs there is also NVIDIA's profiler Nsight Systems. Your `marked_step` works with it as it is: give it NVIDIA's
# two functions. Two more calls do what `start()` and `stop()` of section 6 do, here for the last of four epochs:
#
# ```python
# nvtx = torch.cuda.nvtx
# for epoch in range(4):
#     if epoch == 3:
#         torch.cuda.profiler.start()
#     batches = iter(loader)
#     for _ in range(len(loader)):
#         marked_step(batches, model, optimizer, nvtx.range_push, nvtx.range_pop)
#     if epoch == 3:
#         torch.cuda.profiler.stop()
# ```
#
# The option `--capture-range` tells Nsight Systems to wait for these calls:
#
#     nsys profile --trace=cuda,nvtx --capture-range=cudaProfilerApi --capture-range-end=stop -o epoch_3 python train.py
#
# `--capture-range-end=stop` lets the program go on after `stop()`; the default also ends the session. The command
# writes `epoch_3.nsys-rep`, a file for the program Nsight Systems on your own computer. A run of labcode does all of
# this with `--profile.steps 10:13 --profile.nvtx`.
#
# NVIDIA's loading library **DALI** lifts two limits of section 5. Its own readers are C++ threads in the process of the
# loop, and it can crop, rotate and normalise samples on the GPU, on streams of its own. It has no reader for HDF5 or
# zarr, so NERSC's pipeline keeps 8 Python processes for reading, and DALI copies and normalises: 12.6 samples/s in the
# first epoch and 13.2 in the last, against 12.2 and 12.6 with four workers. labcode's is `--loader.backend dali`.
#
# ## Questions (core, 3 min)
#
# **1.** A GPU is twice as fast as the one before. The data wait of the old one was 0 %, with read/w at 80 % of compute.
# What is it on the new one?
#
# <details><summary>Answer</summary>
#
# Compute is now 50 % of what it was, and read/w still 80 %. The step takes 80 %, and 30 of the 80 are waiting: 37.5 %.
# So it is 1.25 times as fast instead of twice.
# </details>
#
# **2.** Samples are whole maps of one time. Which chunks would you choose, and what do they do to someone who reads the
# temperature of Paris in all 40 years?
#
# <details><summary>Answer</summary>
#
# One time and the whole map, or a few parts of it. The time series of one place then reads a chunk for each time. With
# whole maps that is all of the temperature.
# </details>
#
# **3.** From lesson 00: a GPU multiplies two matrices of 8192 rows and columns at 500 TFLOP/s. How long does that take?
# And what does `time.perf_counter()` before and after `a @ b` say?
#
# <details><summary>Answer</summary>
#
# 2 · 8192³ = 1.1e12 FLOPs, so 2.2 ms. The clock of the process says how long the launch takes, some hundredths of a
# millisecond, unless you synchronize before the second look.
# </details>
#
# ## Recap
#
# | concept | formula or fact | in labcode |
# |---|---|---|
# | a step at best | 6 N T FLOPs / rate of a large matmul | `perf.flops`, `measure.device_speed` |
# | parts of a step | each moment counts once; the rest is a part | `measure.ranges.StepRanges` |
# | a GPU's time | events, or synchronize before you look at the clock | `measure.ranges.StepRanges` |
# | chunks | read whole: their number times their size | `data.generate --chunks` |
# | reading ahead | step = max(read, compute) | `data.loader.Loader` |
# | w workers on c cores | at least max(read/w, compute, (read + compute)/c) | `--loader.workers` |
# | where a step went | unions of intervals, not sums of durations | `perf.breakdown` |
# | what to do first | the largest share | `perf.advice.advice` |
#
# ## Sources
#
# - zarr's guide to chunks: <https://zarr.readthedocs.io/en/stable/user-guide/performance/>; its shards:
#   <https://zarr-specs.readthedocs.io/en/latest/v3/codecs/sharding-indexed/index.html>.
# - PyTorch's data loading: <https://docs.pytorch.org/docs/stable/data.html>; its profiler:
#   <https://docs.pytorch.org/docs/stable/profiler.html>; asynchronous execution:
#   <https://docs.pytorch.org/docs/stable/notes/cuda.html>.
# - NERSC, *Deep Learning at Scale*, the logs of its workers and of DALI, and how it profiles one epoch:
#   <https://github.com/NERSC/dl-at-scale-training>.
# - The copy on a stream of its own follows `data_prefetcher` of NVIDIA's apex:
#   <https://github.com/NVIDIA/apex/blob/master/examples/imagenet/main_amp.py>.
# - Rasp et al. 2020, *WeatherBench*, arXiv:2002.00469: the task.
# - Hersbach et al. 2020, *The ERA5 global reanalysis*, 10.1002/qj.3803.
