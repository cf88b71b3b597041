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
# half of the time when there are a hundred of them. In this lesson you take a training that is several times slower than
# it should be. You find out where its time goes, with a profiler that you write yourself and with PyTorch's, and you
# remove what makes it wait.
#
# ## Goals
#
# - predict how long a step should take, and measure how long it does take;
# - write a timer that says where the time of a step goes, and know why such a timer lies on a GPU;
# - predict how many bytes are read for a sample, from the chunks of the file;
# - write a loader that reads ahead, and predict what that saves, and what more workers save;
# - read a profile, and choose the cure from it.
#
# **Time**: 80 minutes, and 15 more for the open end. **Needs**: lessons 00 and 01.

# %%
import os
import time

import torch

from labcode.lab import check, compare, plot, show_source
from labcode.models import vit
from labcode.teach.labs import l02_by_hand, l02_weather

os.environ["KINETO_LOG_LEVEL"] = "6"  # the profiler's own log lines are left out

torch.set_num_threads(1)

# %% [markdown]
# ## 1. A baseline
#
# We train a small vision transformer (ViT) to predict the weather. It gets a part of the map, 60 by 60 degrees, and
# predicts what that part looks like six hours later. There are four variables: the temperature, two components of the
# wind, and the pressure. The file is made of the ERA5 sample that comes with the course, on a grid of 1 degree.
#
# `Crops` reads the samples: `crops[indices]` gives a batch of states and of what follows them. Its method `pair` reads
# a sample from the file, with one slice for each variable.

# %%
maps = l02_weather.make("runs/maps.zarr", chunks=(16, 180, 360))
show_source(l02_weather.Crops.pair)

# %% [markdown]
# How long should a step take? Most of it is matrix products. `training_flops_per_sample` counts their FLOPs, forward
# and backward, from the shape of the model, and lesson 00 measured the rate that a large matrix product reaches.

# %%
import statistics

from labcode.config import ViTConfig
from labcode.perf.flops import training_flops_per_sample
from labcode.train.device_speed import matmul_flops_per_s

torch.manual_seed(0)
batch_size = 8
model_config = ViTConfig(num_variables=4, num_forcings=0, lat=60, lon=60)
model = vit.ViT(model_config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

step_flops = batch_size * training_flops_per_sample(model_config)
flops_per_s = matmul_flops_per_s(torch.device("cpu"), torch.float32)
print(f"{step_flops / 1e9:.1f} GFLOP a step, {flops_per_s / 1e9:.0f} GFLOP/s")

# %% [markdown]
# **Predict** with `step_flops` and `flops_per_s`: how many seconds does a step take, if matrix products are all there
# is to do?

# %% tags=["predict"]
predicted_s = step_flops / flops_per_s

# %%
def train_step(states, targets):
    optimizer.zero_grad()
    vit.loss(model(states), targets).backward()
    optimizer.step()

crops = l02_weather.Crops(maps)
step_s = []
for states, targets in l02_weather.batches(crops, batch_size, 2):
    train_step(states, targets)  # the first steps are slower: they do not count
for step in range(2, 8):
    started = time.perf_counter()
    states, targets = crops[range(step * batch_size, (step + 1) * batch_size)]
    train_step(states, targets)
    step_s.append(time.perf_counter() - started)

baseline_s = statistics.median(step_s)
print(f"{batch_size / baseline_s:.0f} samples/s")
compare("seconds a step", predicted_s, baseline_s, unit="s", within=2)
ratio = baseline_s * flops_per_s / step_flops
print(f"{ratio:.1f} times as long as the matrix products alone")

# %% [markdown]
# The prediction is too small, by a factor of several. Nothing is wrong with it: it says what the step would take if
# nothing but matrix products had to be done. The rest is what this lesson is about. **Samples/s** at a fixed model and
# batch is our measure from here on. It is called the **throughput**.
#
# **Takeaway: predict first. A step that takes several times as long as its FLOPs say has something to find.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* 8 minutes. Ask: why the median, and why do the first steps not count? (Memory is allocated,
# caches are filled, the libraries choose their kernels. A mean is moved by one hiccup.) On a busy machine both numbers
# move, the ratio less.

# %% [markdown]
# ## 2. A profiler from timers
#
# Where does the rest go? A **profiler** attributes time to parts of a program. The simplest one reads the clock when a
# part begins and when it ends. Two details make it trustworthy.
#
# - The parts have to add up to the whole step. What no part has is called the **rest**. If it is large, you have
#   forgotten a part.
# - Parts can lie inside each other, such as communication inside backward (lesson 05). Then each moment must count only
#   once, for the **innermost** part that runs.
#
# For example: backward begins at 0 s, a communication inside it runs from 2 s to 6 s, backward ends at 9 s, and the
# step at 10 s.

# %% tags=["figure"]
plot.timeline(
    [
        ("the step", "step", 0, 10),
        ("a part", "backward", 0, 9),
        ("a part inside", "communication", 2, 6),
    ],
    xlabel="seconds",
    title="A part inside another one, in a step of 10 s",
    alt="A step from 0 to 10 s, in it backward from 0 to 9 s, and inside backward a "
        "communication from 2 to 6 s",
)

# %% [markdown]
# **Predict.** What are the shares of backward, communication and the rest in these 10 seconds, as fractions?

# %% tags=["predict"]
backward_share = 0.5
communication_share = 0.4
rest_share = 0.1

# %% [markdown]
# The next cell runs labcode's timer for this lesson on a clock that we set ourselves.

# %% tags=["nbval-check-output"]
times = iter([0, 0, 2, 6, 9, 10])
timer = l02_by_hand.StepTimer(clock=lambda: next(times))
with timer.part("backward"), timer.part("communication"):
    pass
shares = timer.shares()
exact = {"within": 1, "found": "counted"}
compare("backward", backward_share, shares["backward"], **exact)
compare("communication", communication_share, shares["communication"], **exact)
compare("rest", rest_share, shares["rest"], **exact)

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
# - `part(name)` attributes the time of its block to `name`. The same name can come again, and then its times add up.
# - In a part inside another one, time counts for the inner one alone.
# - A block that raises an error is counted like any other, the error goes on to whoever called, and the timer works
#   afterwards.
# - `shares()` gives each part's fraction of all the time since the timer was made, and `"rest"` for what no part has.
#   It is asked when no part is open. If there was no part at all, everything is the rest.
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
# Here is how labcode's training loop does it. `_note` is what your timer does at the beginning and the end of a part: it
# notes the moment, and what has run until then. On a GPU such a moment is no look at the clock of the process, but an
# event, as explained below. `marked` gives the part its name in the recording of a profiler (section 6), while there is
# one; otherwise `nullcontext` does nothing.

# %%
from labcode.train.ranges import StepRanges

show_source(StepRanges.__call__)

# %% [markdown]
# Now to our training. `timed_steps` is the loop of section 1 with four parts. It uses labcode's timer; to see yours at
# work, write `StepTimer()` there. (The cell also reads `timer.seconds`, the seconds of each part by its name.)

# %%
def timed_steps(batches):
    timer = l02_by_hand.StepTimer()
    batches = iter(batches)
    while True:
        with timer.part("data"):
            batch = next(batches, None)
        if batch is None:
            return timer
        states, targets = batch
        with timer.part("forward"):
            loss = vit.loss(model(states), targets)
        with timer.part("backward"):
            optimizer.zero_grad()
            loss.backward()
        with timer.part("optimizer"):
            optimizer.step()

timer = timed_steps(l02_weather.batches(crops, batch_size, 6))
shares = timer.shares()
for part, share in shares.items():
    print(f"{part:10} {share:6.1%}   {1e3 * timer.seconds[part] / 6:6.1f} ms a step")

# %% [markdown]
# Data is the largest part. Backward takes longer than forward, because it has twice the matrix products to do: one for
# the gradient of the input, one for that of the weight.
#
# **On a GPU such timers lie.** A line such as `model(states)` does not compute there. It **launches** kernels: it puts
# them into a queue, and returns. The GPU works through the queue later. So the timer sees how long launching takes, and
# the line that happens to wait for a result, often `loss.item()`, gets all the time.

# %% tags=["figure"]
plot.timeline(
    [
        ("your timer", "forward", 0, 2),
        ("your timer", "backward", 2, 5),
        ("your timer", "loss.item()", 5, 31),
        ("GPU", "forward", 1, 10),
        ("GPU", "backward", 10, 30),
    ],
    xlabel="ms",
    title="What the timer says, and what the GPU does",
    alt="The timer gives forward 2 ms, backward 3 ms and loss.item() 26 ms, while "
        "the GPU computes forward for 9 ms and backward for 20 ms",
)

# %% [markdown]
# (The numbers of this picture are made up. There is no GPU in this lesson.) There are two honest ways to time a GPU.
#
# - **Synchronize**: `torch.cuda.synchronize()` waits until the queue is empty. Do it before each look at the clock. The
#   times are right, but the GPU now waits for the next launch after each part, so the step gets slower. Use it for a
#   few steps.
# - **Events**: `event.record()` puts a mark into the queue, and the GPU notes the time when it gets there. Afterwards
#   `start.elapsed_time(stop)` tells the milliseconds between two marks. Nobody waits. labcode's `StepRanges` does this.
#
# **Takeaway: a timer whose parts add up to the step tells where to look. On a GPU the clock is the GPU's.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* 17 minutes. Typical in 2.1: the outer part counts the inner one too (a difference of two clock
# readings), no `finally`, `=` in place of `+=`, and shares of the attributed time alone, which hides the rest. Ask: why
# is `zero_grad` in backward here, and does it matter? (It has to be in some part, else it is in the rest.)

# %% [markdown]
# ## 3. What is read for a sample
#
# Formats for large arrays, such as zarr and HDF5, cut an array into **chunks**, boxes of the same shape. A chunk is
# compressed and stored as one piece, so it can only be read and unpacked as a whole, whatever part of it is wanted.
#
# Our file has chunks of 16 times, 180 latitudes and 360 longitudes, which is the whole map. A sample takes 2 times and a
# part of 60 by 60. Along time, times 3 and 4 lie in the first chunk, which holds times 0 to 15. So for one variable a
# single chunk is read, and it has 16 · 180 · 360 numbers of 4 bytes.

# %% tags=["figure"]
plot.timeline(
    [
        ("wanted", "crop", 30, 90),
        ("chunks of 360 columns", "read", 0, 360),
        ("chunks of 180 columns", "read", 0, 180),
        ("chunks of 180 columns", "left out", 180, 360),
    ],
    xlabel="longitude",
    title="One row of the map: a chunk is read whole",
    alt="Of a row of 360 columns a crop wants 30 to 90; with one chunk all 360 are "
        "read, with chunks of 180 columns only the first 180",
)

# %% [markdown]
# Take the box with times 3 and 4, rows 100 to 159 and columns 30 to 89.
#
# **Predict.** How many bytes of chunks does it touch, of one variable, with chunks of (16, 180, 360)? And how many with
# chunks of (2, 90, 180)? Mind where chunks begin: along time they begin at 0, 2, 4, ...

# %% tags=["predict"]
map_bytes = 16 * 180 * 360 * 4  # one chunk
tile_bytes = 2 * 2 * 90 * 180 * 4  # times 2-3 and 4-5, rows 90-179, columns 0-179

# %% tags=["nbval-check-output"]
import math

tiles = l02_weather.make("runs/tiles.zarr", chunks=(2, 90, 180))

def chunk_bytes_of(path):
    """Bytes of the chunks that zarr asks its store for."""
    arrays, store = l02_weather.open_counted(path)
    temperature = arrays[0]
    temperature[3:5, 100:160, 30:90]
    return len(store.chunks) * math.prod(temperature.chunks) * 4

exact = {"within": 1, "unit": "B", "found": "counted"}
compare("chunks of (16, 180, 360)", map_bytes, chunk_bytes_of(maps), **exact)
compare("chunks of (2, 90, 180)", tile_bytes, chunk_bytes_of(tiles), **exact)

# %% [markdown]
# The sample itself has 2 · 60 · 60 · 4 = 28,800 bytes. The first file unpacks 144 times as much as is wanted, the
# second 9 times.

# %% [markdown] tags=["exercise"]
# ### Exercise 2.2 · Bytes of a box
#
# Write the rule as a function, for any number of axes. `box` has a pair (start, stop) for each axis, where `stop` is no
# longer in the box, as in a slice. `chunks` has the length of a chunk along each axis. A chunk counts in full, also at
# the edge of an array. `box` belongs to whoever calls: leave it as it is.

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
# The cure is to write the file once more, with chunks that fit what is read. What does it change?

# %% tags=["figure"]
crops = l02_weather.Crops(tiles)
better = timed_steps(l02_weather.batches(crops, batch_size, 6))
parts = ["data", "forward", "backward", "optimizer"]
by_part = {}
for part in parts:
    maps_ms = 1e3 * timer.seconds[part] / 6
    tiles_ms = 1e3 * better.seconds[part] / 6
    by_part[part] = {"whole maps": maps_ms, "tiles": tiles_ms}
print(f"data: {better.seconds['data'] / timer.seconds['data']:.2f} of the time")
plot.bars(
    by_part,
    ylabel="ms a step",
    fmt="{:.0f}",
    title="Smaller chunks: less to unpack",
    alt="Milliseconds of data, forward, backward and optimizer with both chunkings; "
        "data takes much less with tiles, the other parts stay",
)

# %% [markdown]
# The bytes went down by a factor of 16 for this box, and the time by less. Each chunk is a request of its own, with a
# price that does not depend on its size: a file is opened, and Python has some work to do. It is the law of lesson 01
# again, α for each request and 1/β for each byte. So chunks can also be too small: chunks of (1, 10, 10) would waste
# hardly a byte, and a sample would need 2 · 6 · 6 = 72 of them for each variable, or more.
#
# **Takeaway: a chunk is read whole. Choose chunks about as large as what a sample reads.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* 11 minutes. Typical in 2.2: `stop // length` counts a chunk too many when the box ends where a
# chunk ends; rounding up the length of the box (`ceil(60 / 90)`) forgets where it begins. Ask: how would you cut a file
# from which whole maps are read, and one from which time series of a place are read? (There is no shape for both; some
# archives keep two copies.)

# %% [markdown]
# ## 4. Read ahead
#
# Reading and computing still take turns. While the next batch is read, nobody computes. But batch 2 does not depend on
# what was computed with batch 1, so it can be read meanwhile. This is called **prefetching**. The picture shows four
# batches that take 30 ms to read and 50 ms to compute with.

# %% tags=["figure"]
def turns(read_ms, compute_ms, num_batches=4):
    rows = []
    for number in range(num_batches):
        start = number * (read_ms + compute_ms)
        rows.append(("in turns", f"read {number + 1}", start, start + read_ms))
        computed = start + read_ms + compute_ms
        rows.append(("in turns", f"compute {number + 1}", start + read_ms, computed))
    return rows

def ahead(read_ms, compute_ms, num_batches=4):
    rows = []
    read_until = 0
    computed_until = 0
    for number in range(num_batches):
        rows.append(("reader", f"read {number + 1}", read_until, read_until + read_ms))
        read_until += read_ms
        start = max(read_until, computed_until)
        computed_until = start + compute_ms
        rows.append(("loop", f"compute {number + 1}", start, computed_until))
    return rows

plot.timeline(
    turns(30, 50) + ahead(30, 50),
    xlabel="ms",
    title="Batches that are read ahead do not keep the loop waiting",
    alt="In turns, four batches take 320 ms; with a reader that reads ahead, the loop "
        "waits for the first batch only, and ends after 230 ms",
)

# %% [markdown]
# In turns, this takes 4 · (30 + 50) = 320 ms. With a reader beside the loop, the loop waits 30 ms for the first batch.
# From then on the next batch is always there: 30 + 4 · 50 = 230 ms.
#
# Now reading takes 60 ms, and computing 50 ms as before.
#
# **Predict.** How many ms do the four batches take in turns, and how many with a reader that reads ahead?

# %% tags=["predict"]
in_turns_ms = 4 * (60 + 50)
read_ahead_ms = 4 * 60 + 50  # the loop waits for each batch, then computes once

# %% tags=["nbval-check-output"]
exact = {"within": 1, "unit": "ms", "found": "simulated"}
compare("in turns", in_turns_ms, turns(60, 50)[-1][3], **exact)
compare("read ahead", read_ahead_ms, ahead(60, 50)[-1][3], **exact)

# %% [markdown]
# In the long run, a step takes max(read, compute), and no longer read + compute.
#
# What does one need for that? A **thread** that reads, and a **queue** between the thread and the loop. `queue.Queue(n)`
# holds at most n items: `put(item)` waits while it is full, and `get()` waits while it is empty. The bound matters. A
# reader that is faster than the loop would otherwise fill the memory with batches.
#
# Can two threads of Python run at the same time? Only one of them can execute Python (that is the **GIL**, the global
# interpreter lock), but the libraries that unpack chunks and multiply matrices release it while they work.

# %% [markdown] tags=["exercise"]
# ### Exercise 2.3 · A loader that reads ahead
#
# Complete the class. `for batch in Prefetcher(source, ahead)` gives what `for batch in source` gives, but `source` is
# read in a thread.
#
# - The order is kept, and a batch may be any object, also `None`.
# - At most `ahead` batches wait in the queue. (The thread may hold one more, which it wants to put there.)
# - If `source` raises an error, of whatever kind, the loop first gets the batches before it, and then this very error.
# - When the loop is over, no thread is left: not at the end, not after an error, and not if the loop was left early by
#   `break`. A `for` loop that is left closes its generator, and then the `finally` around its `yield` runs. Mind a
#   thread that waits for room in the queue just then, with a batch, an error or the end in its hand.
# - The loop may be slow, and so may the source: nobody gives up after some time.
# - A `Prefetcher` can be looped over again. Each loop begins anew.
#
# `ready.put(item, timeout=0.05)` raises `queue.Full` if there is no room after 0.05 s. `stopped.set()` and
# `stopped.is_set()` tell the other side. The check takes some 10 seconds: it also waits until your queue is full.

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
# labcode's version for this lesson has two methods for the thread, `read` and `put`.

# %%
show_source(l02_by_hand.Prefetcher.__iter__)
show_source(l02_by_hand.Prefetcher.read)
show_source(l02_by_hand.Prefetcher.put)

# %% [markdown]
# What does it save for our training? From the timer of section 3 we know what a step reads and computes.

# %%
read_s = better.seconds["data"] / 6
compute_s = sum(better.seconds[part] for part in parts[1:]) / 6  # all but data
print(f"read {1e3 * read_s:.0f} ms, compute {1e3 * compute_s:.0f} ms")

# %% [markdown]
# **Predict** with `read_s` and `compute_s`: how many seconds does a step take when it is read ahead? (The cell that
# measures it takes some 20 seconds.)

# %% tags=["predict"]
prefetched_guess_s = max(read_s, compute_s)

# %%
import statistics


def steps_s(batches, num_warmup=2):
    """The median of the seconds of a step, with the wait for its batch."""
    seconds = []
    started = time.perf_counter()
    for states, targets in batches:
        train_step(states, targets)
        now = time.perf_counter()
        seconds.append(now - started)
        started = now
    return statistics.median(seconds[num_warmup:])

in_turns_s = []
read_ahead_s = []
for _ in range(3):
    source = l02_weather.batches(crops, batch_size, 10)
    in_turns_s.append(steps_s(source))
    source = l02_weather.batches(crops, batch_size, 10)
    read_ahead_s.append(steps_s(l02_by_hand.Prefetcher(source, ahead=2)))
plain_s = statistics.median(in_turns_s)
prefetched_s = statistics.median(read_ahead_s)
compare("seconds a step", prefetched_guess_s, prefetched_s, unit="s", within=2)
print(f"{prefetched_s / plain_s:.2f} of the time in turns")

# %% [markdown]
# The prediction is the best case for the two times that went into it, and these were measured a while ago: if the machine
# was busier then, the step can even be shorter than predicted. Mostly it is longer. The reader needs a processor of its
# own: if other programs keep the second core of this machine busy, little is saved, and your number says so. It also
# needs the GIL for what is Python in zarr, and then the loop waits. On a GPU the loop's processor is nearly idle, so
# there is room for a reader.
#
# To see your own class at work, write `Prefetcher` for `l02_by_hand.Prefetcher` in the cell, and run it again.
#
# **Takeaway: a loader that reads ahead hides the shorter of reading and computing behind the longer one.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* 27 minutes. Typical in 2.3: `None` as the mark of the end; an error that only ends the thread,
# so that the loop waits for ever; a thread that waits in `put` after a `break`, and a `join` that waits for it; an
# unbounded queue. Ask: what would
# `ahead=100` cost? (100 batches of memory, and nothing is gained if reading is the slower of the two.)

# %% [markdown]
# ## 5. More workers
#
# If reading is slower than computing, one reader is not enough. Loaders therefore have **workers**: w processes, each
# of which reads other batches. Processes do not share a GIL, so Python code runs at the same time as well. Together they
# deliver a batch every read/w seconds.
#
# That is true as long as there are cores for them. All that is done for a step, reading and computing, takes
# read + compute seconds of processor time, and c cores cannot deliver it faster than in (read + compute)/c. So for
# w of at least 1
#
# $$\text{step} \geq \max\left(\frac{\text{read}}{w},\ \text{compute},\ \frac{\text{read} + \text{compute}}{c}\right)$$
#
# For example, reading takes 300 ms and computing 200 ms on two cores. With one worker the step takes
# max(300, 200, 250) = 300 ms, and with two max(150, 200, 250) = 250 ms.
#
# **Predict** for the same example with **four** workers, and with no worker at all, in ms.

# %% tags=["predict"]
no_worker_ms = 300 + 200
four_workers_ms = 250  # the two cores are busy all the time

# %% tags=["nbval-check-output"]
def worker_step(read, compute, workers, cores=2):
    """The least time of a step, in the unit of `read` and `compute`."""
    if workers == 0:
        return read + compute
    return max(read / workers, compute, (read + compute) / cores)

exact = {"within": 1, "unit": "ms", "found": "computed"}
compare("no worker", no_worker_ms, worker_step(300, 200, 0), **exact)
compare("four workers", four_workers_ms, worker_step(300, 200, 4), **exact)

# %% [markdown]
# We measure it with labcode's `Loader`, which starts PyTorch's `DataLoader`. To see something, we take the file with the
# bad chunks again, for which reading is slow. `take(step)` gives the batch of a step, and notes in `waited_s` how long
# it has kept the loop waiting. The second curve is the right side of the formula, with the times measured in sections 2
# and 3. The cell takes half a minute.

# %% tags=["figure"]
from labcode.config import LoaderConfig
from labcode.data.loader import Loader
from labcode.data.sampler import Batches

slow_crops = l02_weather.Crops(maps)
sampler = Batches(len(slow_crops), batch_size)
read_s = timer.seconds["data"] / 6
measured_ms = []
model_ms = []
start_s = []
for workers in (0, 1, 2, 4):
    with Loader(slow_crops, sampler, config=LoaderConfig(workers=workers)) as loader:
        loader.take(0)
        start_s.append(loader.waited_s)
        loaded = (loader.take(step)[0] for step in range(1, 12))
        measured_ms.append(1e3 * steps_s(loaded, num_warmup=4))
    model_ms.append(1e3 * worker_step(read_s, compute_s, workers))
starts = ", ".join(f"{seconds:.1f}" for seconds in start_s)
print(f"seconds until the first batch: {starts}")
plot.lines(
    {"measured": measured_ms, "estimated from earlier times": model_ms},
    x=[0, 1, 2, 4],
    xlabel="workers",
    ylabel="ms a step",
    title="Workers take reading out of the loop, as far as there are cores",
    alt="Milliseconds a step with 0, 1, 2 and 4 workers, measured and estimated by "
        "the formula, which does not fall any more from two workers on",
)

# %% [markdown]
# Workers take the reading out of the loop. What more of them can add ends with the number of cores. The formula is a
# bound for the reading and computing of this very moment. The curve is an **estimate**: read and compute were measured
# earlier, in sections 2 and 3. On a quiet machine the measured times lie above it. A measured point can also lie below
# it, if the machine was busier when the timer ran. What the formula leaves out makes steps longer:
#
# - each batch has to get from the worker to the loop (PyTorch puts it into shared memory);
# - more processes than cores take turns, and each turn costs time and empties caches;
# - workers have to be **started**: the second of the printed times contains an interpreter that imports PyTorch. labcode
#   keeps it as a server from which all workers are forked, so that the later ones are there sooner. PyTorch's
#   `DataLoader` starts its workers in each epoch anew, unless `persistent_workers` is on;
# - each worker has its own memory: its own copy of what the dataset holds, and `prefetch` batches.
#
# On a cluster, the cores of a node are shared by its ranks: with 64 cores and 8 GPUs there are 8 for each rank: one for
# the loop, and 7 for its workers.
#
# **DALI**, NVIDIA's data loading library, takes another way. It describes the reading as a pipeline of operators that run
# in C++ threads, and on a GPU also on the GPU. labcode has it behind the same interface: `--loader.backend dali`. It is
# an extra of 1 GB (`pip install labcode[dali]`), and nothing in this lesson needs it.
#
# **Takeaway: take as many workers as make read/w smaller than compute, and never more than the cores that the loop
# leaves.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* 6 minutes. Ask: with `nproc` cores and four ranks on this node, how many workers for each rank?
# And what does the bound say when compute is on a GPU? (The third term is read/c alone.)

# %% [markdown]
# ## 6. PyTorch's profiler
#
# Your timer knows the parts that you named. PyTorch's profiler also records every single operation, on the CPU and on a
# GPU. `record_function` names a part, and the name `ProfilerStep#n` marks a step for the tools that read the recording.

# %%
from torch.profiler import ProfilerActivity, profile, record_function

from labcode import launch
from labcode.perf.advice import advice
from labcode.perf.chrome_trace import read
from labcode.perf.summary import summary


def record(batches):
    """A trace of some steps."""
    batches = iter(batches)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        for step in range(3):
            with record_function(f"ProfilerStep#{step}"):
                with record_function("data"):
                    states, targets = next(batches)
                with record_function("forward"):
                    loss = vit.loss(model(states), targets)
                with record_function("backward"):
                    loss.backward()
                with record_function("optimizer"):
                    optimizer.step()
                    optimizer.zero_grad()
    return read(recorded)

by_maps = record(l02_weather.batches(slow_crops, batch_size, 3))
by_tiles = record(l02_weather.batches(crops, batch_size, 3))
print(summary(by_maps, rows=6))

# %% [markdown]
# From the top:
#
# - the **breakdown**: each moment of a step is computing, communication that nothing hides, waiting for data, or none of
#   them (Python between two operations);
# - the parts, as your timer had them;
# - the operations with the most **self time**, which is the time in an operation without those that it calls. `addmm`
#   and `mm` are matrix products;
# - the **recommendation**, which comes from these shares by fixed rules. (TensorBoard, a viewer of trainings in the
#   browser, has such rules too. `--train.compile` calls PyTorch's compiler, to which lesson 03 comes.)
#
# Now the same for another training: the small GPT on text of lesson 00. Its data is a row of characters in memory. A
# run of labcode records steps with `--profile.steps`.
#
# **Predict.** Is data wait more or less than 10 % of a step of this GPT? Write "more" or "less".

# %% tags=["predict"]
gpt_data_wait = "less"

# %%
done = launch.run(
    "labcode.train", "gpt_tiny", "--train.steps", 8, "--profile.steps", "4:7",
    "--train.out", "runs/gpt", nproc=1, echo=False,
    env_extra={"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
)
by_gpt = read("runs/gpt")
print(summary(by_gpt, rows=6))

# %% tags=["figure"]
gpt_times = plot.step_breakdown(
    {"ViT, whole maps": by_maps, "ViT, tiles": by_tiles, "GPT on text": by_gpt},
    title="The same question has another answer for each training",
    alt="Shares of computing, data wait and the rest in a step of the ViT with both "
        "files and of the GPT, where data wait cannot be seen",
)
gpt_times

# %%
gpt_wait = "more" if any("data wait" in line for line in advice(by_gpt)) else "less"
compare("data wait of the GPT", gpt_data_wait, gpt_wait, found="measured")

# %% [markdown]
# For the GPT more workers would change nothing: there is no data to wait for. What stands out there is computing itself,
# or the many small operations of a small model. These are the subject of lesson 03.
#
# A recorded run can be opened in two more tools: `tensorboard --logdir runs` has a tab for profiles, and
# [Perfetto](https://ui.perfetto.dev) opens the file under `runs/gpt/profile` and shows each operation on a time line.
#
# **Takeaway: profile before you change anything. The cure of one training does nothing for another.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* 8 minutes. Open a trace in Perfetto in front of the class. Recording slows a step down, so read
# shares from a profile, and samples/s from a run without it.

# %% [markdown]
# ## 7. Broken on purpose
#
# One sample of this dataset is damaged. It is read by a worker, in another process. What does the loop get?

# %% tags=["raises-exception"] raises="ValueError: Caught ValueError in DataLoader worker process 0."
from torch.utils.data import DataLoader

damaged = DataLoader(
    l02_weather.Damaged(), batch_size=4, num_workers=1, multiprocessing_context="fork"
)
for number, batch in enumerate(damaged):
    print("batch", number, "has", len(batch), "samples")

# %% [markdown]
# PyTorch does what you did in exercise 2.3: the error travels through the queue, and the loop gets it in the place of
# the batch. Read such a message from its **end**: the last line is the error of the dataset, and above it is the
# traceback of the worker. (If the message is "DataLoader worker (pid 123) is killed by signal: Killed" instead, the
# machine ran out of memory: take fewer workers, or less prefetch.) labcode's own loader shortens it to one line.

# %% [markdown] tags=["solution-only"]
# *For the instructor.* 3 minutes. Ask: why do batches 0 and 1 still come? (The queue is in order, and the error stands
# in the place of batch 2.)

# %% [markdown]
# ## 8. Open end: find what makes it slow
#
# This training works on one crop a step, with a small network. It is much slower than it should be.

# %%
from torch.profiler import ProfilerActivity, profile

from labcode.teach.labs import l02_job


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

job = l02_job.Job(tiles)
with profile(activities=[ProfilerActivity.CPU]) as recorded:
    slow_training(job, 5)
for event in sorted(recorded.key_averages(), key=lambda event: -event.cpu_time_total):
    if event.key in job.counts:
        total_ms = event.cpu_time_total / 1e3
        print(f"{event.key:20} {total_ms:8.1f} ms {event.count:4} calls")

# %% [markdown] tags=["exercise"]
# ### Exercise 2.4 · Open end: the same training, faster
#
# Write `faster_training`, which gives the same log and the same weights. Let the table above tell you where to begin:
# there are three things to cure. Besides what the slow one calls, a job has `job.read_crop(time, place)`, where `place`
# is what `job.place(step)` returns. The rubric of the check:
#
# 1. The weights and the log are those of the slow training, after any number of steps.
# 2. Nothing is computed again that does not change, nothing that nobody looks at, and nothing is read that is not used.
# 3. What guards the run is still there: when a weight is no finite number any more, the same step ends in an error.
#
# The check counts calls, so it does not matter how busy your machine is. It runs the slow training too, so it takes some
# 10 seconds.

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
check("2.4", faster_training)

# %% [markdown] tags=["solution-only"]
# *For the instructor.* 15 minutes, for those who have time. People remove `weights_are_finite`, because it looks
# expensive; the table says that it is not. Others call it and do not look at what it says. Others validate in the wrong
# place, before the step. For those who go on: read ahead with the class of exercise 2.3, and measure.

# %% [markdown]
# ## From here to GPUs and SLURM
#
# | where | start |
# |---|---|
# | a file of any size to try loaders on | `python -m labcode.data.generate big.zarr --gb 2` |
# | 4 workers, crops, steps 10 to 12 recorded | `python -m labcode.train vit_tiny --data.path big.zarr --data.crop 60 60 --loader.workers 4 --profile.steps 10:13` |
# | what the recording says | `python -m labcode.train.profile runs/vit_tiny-001` |
# | a GPU: copies that overlap with computing | add `--loader.pin_memory` |
# | SLURM: cores for the loop and its workers | `#SBATCH --cpus-per-task=8`, and `--loader.workers 7` at most |
#
# A copy from the host to a GPU can run beside computing only if the batch lies in **pinned** memory, which the operating
# system never moves. `--loader.pin_memory` reads into such memory, and labcode copies the next batch on a **stream** of
# its own, which is a second queue of the GPU, while the GPU computes. For GPUs there is also NVIDIA's profiler Nsight
# Systems. `--profile.nvtx` tells it the names of the parts. (NVTX is NVIDIA's library for such marks.)
#
# ## Questions
#
# **1.** A GPU is twice as fast as the one before. The data wait of the old one was 0 %, with read/w at 80 % of compute.
# What is it on the new one?
#
# <details><summary>Answer</summary>
#
# Compute is now 50 % of what it was, and read/w still 80 %. The step takes 80 %, and 30 of the 80 are waiting: 37.5 %.
# So it is 1.25 times as fast, and not twice.
# </details>
#
# **2.** On a GPU your timer says: forward 2 ms, backward 3 ms, `loss.item()` 80 ms. Which line do you optimise?
#
# <details><summary>Answer</summary>
#
# None yet. `loss.item()` waits for everything that was launched before it. Measure with events, or with the profiler,
# where the 80 ms of the GPU go. (Calling `item()` less often still helps: the loop can launch ahead then.)
# </details>
#
# **3.** Samples are whole maps of one time. Which chunks would you choose, and what do they do to someone who reads the
# temperature of Paris in all 40 years?
#
# <details><summary>Answer</summary>
#
# One time and the whole map, or a few parts of it. The time series of one place then reads a chunk for each time: the
# whole file.
# </details>
#
# **4.** From lesson 01: which part of the α-β model says that chunks can be too small?
#
# <details><summary>Answer</summary>
#
# α, which is paid for each request. As with messages, cutting the same bytes into more pieces costs α for each piece.
# </details>
#
# ## Recap
#
# | concept | formula or fact | in labcode |
# |---|---|---|
# | a step at best | FLOPs / rate of a large matrix product | `perf.flops`, `train.device_speed` |
# | parts of a step | each moment counts once; the rest is a part | `train.ranges.StepRanges` |
# | a GPU's time | events, or synchronize before you look at the clock | `train.ranges.StepRanges` |
# | chunks | read whole: their number times their size | `data.generate --chunks` |
# | reading ahead | step = max(read, compute) | `data.loader.Loader` |
# | w workers on c cores | max(read/w, compute, (read + compute)/c) | `--loader.workers` |
# | what to do first | the largest share | `perf.advice.advice` |
#
# ## Sources
#
# - zarr's guide to chunks: <https://zarr.readthedocs.io/en/stable/user-guide/performance/>.
# - PyTorch's data loading: <https://docs.pytorch.org/docs/stable/data.html>; its profiler:
#   <https://docs.pytorch.org/docs/stable/profiler.html>; asynchronous execution:
#   <https://docs.pytorch.org/docs/stable/notes/cuda.html>.
# - NVIDIA DALI: <https://docs.nvidia.com/deeplearning/dali/user-guide/docs/>.
# - Rasp et al. 2020, *WeatherBench*, arXiv:2002.00469: the task, and the loss weighted by area.
# - Hersbach et al. 2020, *The ERA5 global reanalysis*, 10.1002/qj.3803.
