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
# # 01 · Processes and collectives
#
# Every way of training on many devices comes down to a handful of operations in which processes exchange tensors. This lesson runs all of
# them, builds the most important one from sends and receives, and predicts what it costs.
#
# ## Goals
#
# - know how processes find each other, and what rank, world size and rendezvous mean;
# - tell for each collective who holds what before and after;
# - write a ring all-reduce, count its bytes and predict its time;
# - read the errors of a rank that is missing and of ranks that disagree.
#
# **Time**: 60 minutes. **Needs**: lesson 00, PyTorch on one device, two cores.

# %%
import statistics
from datetime import timedelta

import torch
import torch.distributed as dist

from labcode.comm import ring
from labcode.comm.timing import call_times
from labcode.perf import alpha_beta as comm
from labcode.pool.ranks import Ranks
from labcode.teach.check import check, compare
from labcode.teach.exercises import l01
from labcode.teach.figures import plot
from labcode.units import seconds, si

ranks = Ranks(4, timeout_s=15)

# %% [markdown]
# ## 1. How processes find each other
#
# The same program runs in each of p processes. p is the **world size**, and a process's number, 0 to p - 1, is its **rank**: the one thing
# that differs. All memory is separate: the same name stands for p different variables. The next cell sets `x` to 1 on all four ranks and
# adds 100 on rank 2.
#
# **Predict.** What is the sum of `x` over the four ranks?

# %% tags=["predict"]
guess_x = 1 + 1 + 101 + 1

# %% tags=["nbval-check-output"]
def own_x(rank):
    x = torch.tensor(1.0)
    if rank == 2:
        x += 100
    print(f"this is rank {rank} of {dist.get_world_size()}, x = {x.item():g}")
    return x.item()

compare("sum of x over the ranks", guess_x, sum(ranks.run(own_x)), within=1)

# %% [markdown]
# Before two processes can talk, each must know that the other exists and where. The launcher tells each process three things: its rank, the
# world size, and the address of a **store**: a small server that keeps pairs of a key and a value. Each process writes its own address
# there and reads those of the others. That meeting is the **rendezvous**.
#
# Here is one by hand. This notebook plays the launcher and opens a store; each rank leaves an address and looks up its right neighbour's.

# %%
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # port 0: any free one

def meet(rank, port):
    store = dist.TCPStore("127.0.0.1", port)
    store.set(f"address of {rank}", f"host-{rank}:29500")
    neighbour = store.get(f"address of {(rank + 1) % 4}").decode()  # waits until somebody has set the key
    return f"rank {rank} will call {neighbour}", store.add("arrived", 1)

for line, arrival in ranks.run(meet, store.port):
    print(f"{line}   (arrival {arrival})")

# %% [markdown]
# Two properties of the store carry the meeting:
#
# - `get` **waits** for a key that is not there yet, so nobody needs to come first;
# - `add` reads and increases in one step, so no two processes see the same count.
#
# Arrivals come in any order. The pool's own ranks met the same way, with keys written by gloo, the library that carries CPU tensors.
# Tensors never pass through the store: after the meeting, processes talk directly.
#
# **Takeaway: rank, world size and the address of a store are all that a process must be told. A start-up that hangs is a rendezvous
# that somebody did not come to.**
#
# ### Exercise 1.1 · Hand out ranks
#
# An elastic launcher does not know beforehand which machine will be number 0: processes get their rank from the store. Complete the
# function: 0, 1, 2, … in the order of arrival, each number once, even if all arrive at the same moment. One line.

# %% tags=["exercise"]
def my_rank(store):
    """A rank for the process that calls: 0 for the first, 1 for the second, and so on."""
    ### BEGIN SOLUTION
    return store.add("ranks given out", 1) - 1
    ### END SOLUTION

# %% tags=["check"]
check("1.1", lambda: l01.hand_out(my_rank, ranks))

# %% [markdown]
# ## 2. From one message to eight collectives
#
# The smallest exchange has a sender and a receiver. `send(x, dst)` and `recv(x, src)` block: they return when the tensor has been handed
# over. The receiver brings a tensor of the right shape and type, which is filled: a message carries numbers, nothing about their meaning.

# %% tags=["nbval-check-output"]
def hand_over(rank):
    x = torch.arange(3.0) if rank == 0 else torch.zeros(3)
    if rank == 0:
        dist.send(x, dst=1)
    elif rank == 1:
        dist.recv(x, src=0)
    return x.tolist()

print(ranks.run(hand_over))

# %% [markdown]
# Patterns of messages that come up again and again have names. In a **collective** all ranks call the same function, in the same order, with
# tensors of one shape. Four of them have a root, the rank that gives or gets everything. In the pictures a colour is the rank that the data
# comes from. In the runs rank r starts with the numbers 10 r, 10 r + 1, 10 r + 2, 10 r + 3.

# %% tags=["figure"]
plot.collectives(("broadcast", "scatter", "gather", "reduce"), 4,
                 alt="Broadcast copies rank 0's data to all, scatter deals out its parts, gather collects parts on rank 0, reduce adds them there")

# %% tags=["nbval-check-output"]
def with_root(rank, root=0):
    a = torch.tensor([10 * rank, 10 * rank + 1, 10 * rank + 2, 10 * rank + 3])
    copy, total, part, parts = a.clone(), a.clone(), torch.zeros(1, dtype=a.dtype), [torch.zeros_like(a) for _ in range(4)]
    dist.broadcast(copy, src=root)
    dist.scatter(part, list(a.chunk(4)) if rank == root else None, src=root)
    dist.gather(a, parts if rank == root else None, dst=root)
    dist.reduce(total, dst=root)
    gathered, reduced = (torch.cat(parts).tolist(), total.tolist()) if rank == root else ("-", "-")
    return copy.tolist(), part.tolist(), gathered, reduced

for name, *held in zip(("broadcast", "scatter", "gather", "reduce"), *ranks.run(with_root)):
    print(f"{name:10}", *held, sep="  ")

# %% [markdown]
# A line holds what ranks 0 to 3 have afterwards. `reduce` leaves the sum on the root only; the others hold leftovers. The next four have no
# root, and they carry the training of large models: gradients are averaged by an all-reduce, sharded weights are put together by an
# all-gather, their gradients added up by a reduce-scatter, and an all-to-all changes which dim of a tensor is cut.
#
# **Predict.** Rank r again starts with 10 r, 10 r + 1, 10 r + 2, 10 r + 3. What does **rank 2** hold afterwards: the first number after an
# all-reduce, its only number after a reduce-scatter, the last number after an all-to-all?

# %% tags=["figure"]
plot.collectives(("all_gather", "all_reduce", "reduce_scatter", "all_to_all"), 4,
                 alt="After all-gather and all-reduce every rank has the same; reduce-scatter leaves one sum each; all-to-all swaps rows and columns")

# %% tags=["predict"]
guess_all_reduce = 0 + 10 + 20 + 30
guess_reduce_scatter = 2 + 12 + 22 + 32
guess_all_to_all = 32

# %% tags=["nbval-check-output"]
def without_root(rank):
    a = torch.tensor([10 * rank, 10 * rank + 1, 10 * rank + 2, 10 * rank + 3])
    total, part, parts, swapped = a.clone(), torch.zeros_like(a[:1]), [torch.zeros_like(a) for _ in range(4)], torch.zeros_like(a)
    dist.all_gather(parts, a)
    dist.all_reduce(total)
    dist.reduce_scatter(part, list(a.chunk(4)))
    dist.all_to_all_single(swapped, a)
    return torch.cat(parts).tolist(), total.tolist(), part.tolist(), swapped.tolist()

gathered, all_reduced, reduce_scattered, swapped = on_rank_2 = ranks.run(without_root)[2]
for name, held in zip(("all_gather", "all_reduce", "reduce_scatter", "all_to_all"), on_rank_2):
    print(f"rank 2 after {name:15}{held}")
compare("all-reduce, first number", guess_all_reduce, all_reduced[0], within=1)
compare("reduce-scatter, only number", guess_reduce_scatter, reduce_scattered[0], within=1)
compare("all-to-all, last number", guess_all_to_all, swapped[3], within=1)

# %% [markdown]
# Look at two of the pictures together. After a reduce-scatter, rank i holds the finished sum of part i. An all-gather of these parts gives
# every rank all sums. So **all-reduce = reduce-scatter + all-gather**. Large parts of this course rest on that one line: ZeRO and FSDP stop
# half way and keep the parts apart, and the ring below is just these two halves.
#
# **Takeaway: a collective is a contract: all ranks, the same call, the same order, the same shape. What a rank holds afterwards follows from
# the picture.**

# %% [markdown]
# ## 3. An all-reduce by hand
#
# How would you add up n bytes over p ranks? The obvious way is a **star**: everybody sends to rank 0, rank 0 adds and sends the sum back. It
# works, and it gets worse with every rank: rank 0 alone receives (p - 1) n bytes and sends as many, while the others wait.
#
# The **ring** has no such centre. Every rank talks only to its right and left neighbour. The tensor is cut into p chunks; in each step
# a rank passes one chunk on, and all ranks do so at the same time.

# %% tags=["figure"]
plot.ring(4, alt="In three adding steps each rank completes one chunk; in three copying steps the complete chunks go round to everybody")

# %% [markdown]
# Steps 1 to 3 are a reduce-scatter: a chunk (a column) collects one contribution at each stop, until rank r holds the finished chunk
# (r + 1) mod p. Steps 4 to 6 are an all-gather: finished chunks go round once more. Each of the 2 (p - 1) steps moves n / p bytes. A trap: if
# every rank first sends to the right and waits, nobody receives, a **deadlock**. So start a send and a receive together, then wait for both.
#
# **Predict.** With p = 4 and n = 1 MiB: how many bytes does rank 0 send as the centre of a star, and how many on the ring?

# %% tags=["predict"]
guess_star = (4 - 1) * 2**20
guess_ring = 2 * (4 - 1) * 2**20 / 4

# %%
def exchange(send, receive):
    """Send to the right neighbour while receiving from the left one; returns the bytes sent."""
    rank, p = dist.get_rank(), dist.get_world_size()
    operations = [dist.P2POp(dist.isend, send, (rank + 1) % p), dist.P2POp(dist.irecv, receive, (rank - 1) % p)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return send.nbytes

def reduce_scatter_phase(chunks):
    """Add up each chunk on its way round, in place; chunk (rank + 1) % p is finished here. Returns the bytes sent."""
    rank, p, sent = dist.get_rank(), dist.get_world_size(), 0
    arrived = torch.empty_like(chunks[0])
    for step in range(p - 1):
        sent += exchange(chunks[(rank - step) % p], arrived)
        chunks[(rank - step - 1) % p] += arrived
    return sent

# %% [markdown] tags=["exercise"]
# ### Exercise 1.2 · The second half of the ring
#
# Write the all-gather phase with `exchange`. It starts where the first half stops: rank r holds the finished chunk (r + 1) mod p. Each step
# passes on the chunk that was finished last, and what arrives can go straight into its place. The picture's thick frames say where.
# Two lines are missing.

# %% tags=["exercise"]
def all_gather_phase(chunks):
    """Pass the finished chunks round the ring, in place; returns the bytes sent."""
    rank, p, sent = dist.get_rank(), dist.get_world_size(), 0
    for step in range(p - 1):
        ### BEGIN SOLUTION
        out, into = chunks[(rank + 1 - step) % p], chunks[(rank - step) % p]
        sent += exchange(out, into)
        ### END SOLUTION
    return sent

# %% tags=["check"]
check("1.2", lambda: l01.all_gather_phase(all_gather_phase, ranks))

# %% [markdown]
# `labcode.comm.ring` holds both halves and the star, written the same way. Now count. Each function returns the bytes it sent. For PyTorch's
# own `dist.all_reduce` nobody counts, so we ask the operating system: on one machine all messages pass through the **loopback** device, which
# knows how many bytes it has carried for all ranks together.

# %% tags=["nbval-check-output"]
def count(rank):
    x = torch.arange(2.0**18) + rank  # 2**18 numbers of 4 bytes: 1 MiB
    star, theirs = x.clone(), x.clone()
    sent = ring.star_all_reduce(star, dist.group.WORLD), ring.all_reduce(x, dist.group.WORLD)
    dist.barrier()
    before = ring.loopback_bytes()
    dist.barrier()
    dist.all_reduce(theirs)
    dist.barrier()
    return *sent, ring.loopback_bytes() - before, torch.equal(x, theirs) and torch.equal(star, theirs)

by_star, by_ring, loopback, equal = zip(*ranks.run(count))
print("all three sums are equal:", all(equal), "  star in all:", f"{sum(by_star):,}", "  ring in all:", f"{sum(by_ring):,}")
compare("rank 0 sends, star", guess_star, by_star[0], within=1, unit="B")
compare("rank 0 sends, ring", guess_ring, by_ring[0], within=1, unit="B")

# %% tags=["figure"]
compare("dist.all_reduce, all ranks", 4 * comm.bytes_sent("all_reduce", 4, 2**20), loopback[0], unit="B")
plot.bars({f"rank {r}": {"star": by_star[r] / 2**20, "ring": by_ring[r] / 2**20} for r in range(4)}, ylabel="sent, in units of n",
          title="Both move 6 n bytes in all", alt="In the star rank 0 sends three times the tensor and the others once; in the ring each sends one and a half")

# %% [markdown]
# The ring does not save a single byte. Both move 2 (p - 1) n in all; the ring **spreads** them over all links, which work at the same time.
# Per rank that is 2 (p - 1)/p times n: 1.5 n for four ranks, never more than 2 n. In a star of 1024, rank 0 would send 1023 n. For PyTorch's
# own all-reduce the loopback device counted the same 6 n, and a little more for packet headers and whatever else used it.
#
# **Takeaway: a ring all-reduce sends 2 (p - 1)/p · n bytes per rank, almost independent of p. No algorithm lets its
# busiest rank send less (Patarasuk, Yuan 2009).**

# %% [markdown]
# ## 4. What does it cost?
#
# A message costs something before its first byte arrives: two processes wake up, a protocol runs. Then bytes flow at some speed. That is the
# **alpha-beta model**: n bytes take $\alpha + n/\beta$, with the latency $\alpha$ in seconds and the bandwidth $\beta$ in bytes/s.
# A ring all-reduce sends 2 (p - 1) messages, one after the other:
#
# $$t(n) = 2(p-1)\,\alpha + \frac{2(p-1)}{p}\,\frac{n}{\beta}.$$
#
# Two unknowns, so two sizes are enough. `call_times` calls a function twenty times on each rank, after a barrier. We keep the fastest and the
# median.
#
# **Predict** from the $\alpha$ and $\beta$ that the cell prints: how long does an all-reduce of 1 MiB take, in seconds?

# %%
def all_reduce(x):
    dist.all_reduce(x)

def fastest_and_median(call, num_bytes):
    """Seconds until the slowest rank is done."""
    slowest = [max(times) for times in zip(*ranks.run(call_times, call, num_bytes))]
    return min(slowest), statistics.median(slowest)

small_s, large_s = (fastest_and_median(all_reduce, n)[0] for n in (2**10, 2**24))
link = comm.fit("all_reduce", 4, [2**10, 2**24], [small_s, large_s])
print(f"1 KiB {seconds(small_s)}, 16 MiB {seconds(large_s)}: alpha = {seconds(link.alpha_s)}, beta = {si(link.beta_bytes_per_s, 'B/s')}")

# %% tags=["predict"]
guess_s = 6 * link.alpha_s + 1.5 * 2**20 / link.beta_bytes_per_s

# %%
sizes = [2**k for k in range(10, 25, 2)]
fastest, median = map(list, zip(*(fastest_and_median(all_reduce, n) for n in sizes)))
compare("all-reduce of 1 MiB", guess_s, fastest[sizes.index(2**20)], within=2, unit="s")
by_hand = fastest_and_median(lambda x: ring.all_reduce(x, dist.group.WORLD), 2**24)[0]
print(f"16 MiB: our ring takes {by_hand / fastest[-1]:.1f} times as long as dist.all_reduce")

# %% tags=["figure"]
model = [comm.time_s("all_reduce", 4, n, link) for n in sizes]
series = {"median of 20": median, "fastest of 20": fastest, "model": model}
plot.lines({name: [1e3 * t for t in times] for name, times in series.items()}, x=sizes, logx=True, logy=True,
           xlabel="bytes in the tensor", ylabel="ms", reference={"latency, 6 alpha": 6e3 * link.alpha_s},
           title="All-reduce on four ranks", alt="Time stays level up to some hundred kilobytes and then grows in proportion to the size, as the model says")

# %% [markdown]
# On the left the curve is flat: all the time is latency. On the right it rises in proportion: bandwidth. They cost the same at the bend,
# n = p α β. Noise only adds time: the fastest calls, usually within a factor of two of the model, show what the link can do, the medians what
# you get. One rule is bent: here four ranks share the cores that copy every byte. Our own ring is slower on large tensors; gloo cuts finer
# and adds one piece while it receives the next.
#
# A model has hundreds of gradients, many of them small. Send 64 of 16 KiB one by one, or together, as one **bucket** of 1 MiB:

# %%
def one_by_one(x):
    for part in x.chunk(64):
        dist.all_reduce(part)

predicted = 64 * comm.time_s("all_reduce", 4, 2**14, link) / comm.time_s("all_reduce", 4, 2**20, link)
measured = fastest_and_median(one_by_one, 2**20)[1] / median[sizes.index(2**20)]
compare("64 small ones, against one", predicted, measured, within=2)

# %% [markdown] tags=["exercise"]
# Often it is worse than predicted: among 64 calls some are always interrupted, and each makes the next one wait.
#
# **Takeaway: below p α β you pay for messages, above it for bytes. So small tensors travel together.** Lesson 04 builds on this.
#
# ### Exercise 1.3 · How large should a bucket be?
#
# Larger buckets waste less latency, but they are ready later. Find the smallest bucket, in bytes, in which latency takes at most the
# fraction `share` of the time of a ring all-reduce. Solve t(n) for n on paper first; then it is one line.

# %% tags=["exercise"]
def bucket_bytes(link, p, share):
    """Bytes of the tensor for which 2 (p - 1) alpha is `share` of the whole time; link has .alpha_s and .beta_bytes_per_s."""
    ### BEGIN SOLUTION
    return p * link.alpha_s * link.beta_bytes_per_s * (1 - share) / share
    ### END SOLUTION

# %% tags=["check"]
check("1.3", lambda: l01.bucket(bucket_bytes))

# %% [markdown]
# ## 5. Broken on purpose
#
# The contract of section 2 can be broken in three ways, and each looks different. First: **somebody does not come.** Only rank 0 prints the
# loss, so why should the others bother with its mean? The group here gives up after 2 seconds; by default gloo waits for 30 minutes, NCCL
# for 10.

# %% tags=["raises-exception"] raises="RankError: rank 0: RuntimeError: ... Timed out waiting"
def loss_for_the_log(rank):
    group = dist.new_group(timeout=timedelta(seconds=2))
    loss = torch.tensor(float(rank))
    if rank == 0:  # only rank 0 prints it
        dist.all_reduce(loss, group=group)
        return loss.item() / 4

ranks.run(loss_for_the_log)

# %% [markdown]
# "Timed out waiting": a rank that *waited* complains, and PyTorch does not say for whom. (The last line, `finished before`, is an extra of
# `Ranks`; a cluster has none.) On gloo, `monitored_barrier` finds out: rank 0 collects a sign of life from everybody and names those who sent
# none. Put it before a collective that hangs. Here rank 3 stays away, and each rank returns what it was told.

# %%
def roll_call(rank):
    group = dist.new_group(timeout=timedelta(seconds=2))
    if rank != 3:
        try:
            dist.monitored_barrier(group, timeout=timedelta(seconds=2), wait_all_ranks=True)
        except RuntimeError as error:
            return str(error).strip().splitlines()[0]

for rank, message in enumerate(ranks.run(roll_call)):
    print(f"rank {rank} was told: {message}")

# %% [markdown]
# Rank 0 knows. Ranks 1 and 2 only noticed that rank 0 gave up, and blame rank 0: an echo, as in lesson 00.
#
# Second: **everybody comes, but with different tensors.** Rank 3 holds its weight transposed: as many numbers, another shape. All ranks hold
# the same weight, so the sum should be four times that.

# %% tags=["nbval-check-output"]
def disagree(rank, group=None):
    weight = torch.arange(6.0).view(2, 3)
    if rank == 3:
        weight = weight.T.contiguous()
    dist.all_reduce(weight, group=group)
    return weight.flatten().tolist()

print("due  ", [4.0 * i for i in range(6)])
print("found", ranks.run(disagree)[0])

# %% [markdown]
# No error, and wrong numbers: the bytes of one shape were added to those of another. With different *sizes* anything can happen: a hang, a wrong
# result on some ranks, a crash of the process. Third, the **order**: a rank that calls broadcast while the others call all-reduce. For both,
# PyTorch can compare the calls before it runs them, at the price of an extra round per call. In a job, set
# `TORCH_DISTRIBUTED_DEBUG=DETAIL` before the ranks start; here a group made in that mode will do.

# %% tags=["raises-exception"] raises="RankError: rank ... RuntimeError: Detected mismatch between collectives on ranks"
def disagree_watched(rank):
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        return disagree(rank, dist.new_group(timeout=timedelta(seconds=5)))
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)

ranks.run(disagree_watched)

# %% [markdown]
# The message names two ranks, what each was running, and at its end the difference: the tensor shapes.
#
# | what you see | what it usually is | next step |
# |---|---|---|
# | hang, then "Timed out waiting" | a rank skipped the call or died | `monitored_barrier` in a gloo group; look for an `if rank == …` |
# | "Connection closed by peer" | another rank failed first | find the first error by time |
# | wrong numbers, no error | shapes or order differ | `TORCH_DISTRIBUTED_DEBUG=DETAIL` |
# | hang at the start | the rendezvous is incomplete | compare world size and the number of processes started |
#
# **Takeaway: the rank that reports an error is often not the one that made it. Ask who did not come, then who came with something else.**
#
# ### Exercise 1.4 · Mend it
#
# Write the mean loss so that nobody waits for ever: rank 0 gets the mean over all ranks as a number or tensor, the others get `None`. The
# training loop still needs the `loss` that it hands you, so leave it as it is.

# %% tags=["exercise"]
def mean_loss(rank, loss):
    """The mean of `loss` over all ranks, on rank 0; None elsewhere."""
    ### BEGIN SOLUTION
    total = loss.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size() if rank == 0 else None
    ### END SOLUTION

# %% tags=["check"]
check("1.4", lambda: l01.mended(mean_loss, ranks))

# %% [markdown]
# ## From here to GPUs and SLURM
#
# `labcode.comm.bootstrap` reads rank, world size and the store's address from what torchrun or SLURM's srun (with `MASTER_ADDR` and
# `MASTER_PORT` exported) set. Call `world = bootstrap.start()` first and the functions above run in a script, under
# `torchrun --nproc-per-node=8 script.py` or `srun python script.py`; tensors on `world.device` travel over NCCL where there are GPUs. What
# changes is α and β. Published times of all-reduces on 8 A100 with NVLink: 32 KiB in 43.83 µs, 32 MiB in 424 µs, 1 GiB in 8203.9 µs (Bekman,
# see Sources). Does the model hold there?

# %% tags=["nbval-check-output"]
nvlink = comm.fit("all_reduce", 8, [2**15, 2**30], [43.83e-6, 8203.9e-6])
compare("32 MiB on 8 A100", comm.time_s("all_reduce", 8, 2**25, nvlink), 424e-6, within=1.5, unit="s")
ddp = comm.time_s("all_reduce", 8, 25 * 2**20, nvlink)
print(f"alpha = {seconds(nvlink.alpha_s)}, beta = {si(nvlink.beta_bytes_per_s, 'B/s')}, bend at {si(comm.balance_bytes('all_reduce', 8, nvlink), 'B')}")
print(f"latency takes {comm.messages('all_reduce', 8) * nvlink.alpha_s / ddp:.0%} of an all-reduce of 25 MiB")

# %% [markdown]
# The middle is off by 40 %: NCCL switches algorithms and protocols with the size. Still, two numbers span four orders of magnitude, and they
# explain a default: PyTorch's DDP sends buckets of 25 MiB, at which latency takes about a fifth.
#
# ### Exercise 1.5 · Open end: faster for small tensors
#
# For tiny tensors a ring is slow: six messages, one after the other, for four ranks. Invent an all-reduce in which no rank sends more than **two**
# messages. More bytes are allowed. `ring.exchange(send, to, receive, source, dist.group.WORLD)` sends and receives at once, with any partners.
# Then work out below which size yours beats the ring.
#
# <details><summary>One answer</summary>
#
# Pairs at distance 1, then at distance 2, each rank sending the whole tensor: 2 α + 2 n/β, against 6 α + 1.5 n/β on the ring. It wins while
# 0.5 n/β is less than 4 α: below n = 8 α β. For p ranks it takes log₂ p rounds. Libraries choose by size (Thakur et al. 2005).
# </details>

# %% tags=["exercise"]
def quick_all_reduce(x):
    """Sum x over four ranks, in place; at most two messages sent by each."""
    ### BEGIN SOLUTION
    rank, arrived = dist.get_rank(), torch.empty_like(x)
    for distance in (1, 2):  # recursive doubling: pairs, then pairs of pairs
        partner = rank ^ distance
        ring.exchange(x, partner, arrived, partner, dist.group.WORLD)
        x += arrived
    ### END SOLUTION

# %% tags=["check"]
check("1.5", lambda: l01.quick(quick_all_reduce, ranks))

# %% [markdown]
# ## Recap
#
# | concept | formula or fact | in labcode |
# |---|---|---|
# | rank, world size, store | `get` waits, `add` counts | `comm.bootstrap`, `comm.ranks` |
# | all-reduce | reduce-scatter, then all-gather | `comm.ring` |
# | bytes per rank, ring | 2 (p - 1)/p · n; half of it for each phase | `perf.comm.bytes_sent` |
# | time, ring | 2 (p - 1) α + 2 (p - 1)/p · n/β | `perf.comm.time_s`, `perf.comm.fit` |
# | bend | n = p α β | `perf.comm.balance_bytes` |
# | missing rank | `monitored_barrier` names it | |
# | different calls | `TORCH_DISTRIBUTED_DEBUG=DETAIL` | |
#
# ## Sources
#
# - Hockney 1994, *The communication challenge for MPP*, Parallel Computing 20(3): the model of latency and bandwidth.
# - Thakur, Rabenseifner, Gropp 2005, *Optimization of collective communication operations in MPICH*, IJHPCA 19(1): algorithms and their costs.
# - Patarasuk, Yuan 2009, *Bandwidth optimal all-reduce algorithms for clusters of workstations*, JPDC 69(2): the ring, and why no
#   algorithm sends less.
# - Times on A100: S. Bekman, *Machine Learning Engineering*, network/README.md, github.com/stas00/ml-engineering, measured with nccl-tests.
# - Debugging: docs.pytorch.org/docs/stable/distributed.html, `monitored_barrier` and `TORCH_DISTRIBUTED_DEBUG`.

# %%
ranks.close()
