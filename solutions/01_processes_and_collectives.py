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
# A network that is trained on many devices runs as one process for each device. The processes work on different data,
# or on different parts of the network, and they exchange tensors all the time, with a handful of operations. In this
# lesson you meet all of them, write the most important one from nothing but sends and receives, and predict how long it
# takes.
#
# ## Goals
#
# - explain how processes find each other, and what rank, world size and process group mean;
# - say what each rank holds before and after each collective;
# - write an all-reduce from sends and receives, and count its messages and bytes;
# - predict the time of an all-reduce from its size;
# - recognise the three ways in which a collective goes wrong, and know where to look.
#
# **Time**: 112 minutes, and 22 more for what is optional. Good places for a break are after section 3 and after
# section 6.
#
# **Needs**: lesson 00 (sections 1 and 2).

# %%
import torch
import torch.distributed as dist

from course.lab import Ranks, check, compare, plot
from labcode.comm import ring
from labcode.runtime.units import si

ranks = Ranks(4)

# %% [markdown]
# ## 1. How processes find each other (core, 14 min)
#
# The same program runs in every process. The number of processes is the **world size**, and we call it p. Each process
# has a number from 0 to p - 1, its **rank**, which is the only thing that makes it different from the others.
#
# Before two processes can talk, each must know that the other exists, and at which address. That cannot be written into
# the program: on a cluster, the scheduler picks the machines only when the job starts. So the processes need a place
# that all of them know, where they can leave their addresses for each other.
#
# This place is the **store**, a small server that keeps pairs of a key and a value. The program that starts the
# processes, the **launcher**, tells each of them its rank, the world size, and the address of the store. Each process
# then writes its own address into the store, under a key with its rank, and reads the addresses of the others. This is
# called the **rendezvous**.
#
# In the next cell this notebook plays the launcher and opens a store, and the ranks do a rendezvous by hand. Each one
# writes an address, and reads that of its right neighbour. Two properties of the store make this work in any order:
#
# - `get` **waits** until somebody has set the key;
# - `add` reads a number, increases it, and returns the new number, all in **one step**, so that nobody can come in
#   between.

# %%
any_free_port = 0
store = dist.TCPStore(
    "127.0.0.1", any_free_port,
    is_master=True,  # this process is the server
    wait_for_workers=False,  # return at once, before anybody else has come
)

def meet(rank, port):
    store = dist.TCPStore("127.0.0.1", port)
    store.set(f"address of {rank}", f"host-{rank}:29500")
    right = (rank + 1) % 4
    neighbour = store.get(f"address of {right}").decode()
    arrival = store.add("arrived", 1)
    print(f"I will call {neighbour}")
    return arrival

arrivals = ranks.run(meet, store.port)
print("ranks 0 to 3 were the numbers", arrivals, "to arrive")

# %% [markdown]
# The order changes from run to run, but no number is given out twice, so a launcher can give out ranks in this way.
# PyTorch itself counts with `add` how many processes have arrived: when the number reaches the world size, everybody is
# there.
#
# The four ranks that `Ranks(4)` has started, our **pool**, met in the same way before this lesson began. The tensors
# themselves never pass through the store: once two processes know each other's address, they talk directly.
#
# ### The same in a script
#
# On a cluster there is no pool, but a script and a launcher. PyTorch's launcher, **torchrun**, opens the store, starts
# the script once for each rank, and puts the rank, the world size and the address of the store into the environment
# variables `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`. In the script `dist.init_process_group` reads them and
# holds the rendezvous. "gloo" is the library that sends the tensors of CPUs. The smallest distributed program has six
# lines below its imports:

# %%
from pathlib import Path

from labcode.runtime import launch

HELLO = """\
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
x = torch.tensor(float(rank))
dist.all_reduce(x)  # x becomes the sum over all ranks
print(f"rank {rank} of {dist.get_world_size()} holds the sum, {x.item():g}")
dist.destroy_process_group()
"""
Path("runs").mkdir(exist_ok=True)
Path("runs/hello.py").write_text(HELLO)
done = launch.run("runs.hello", nproc=4)

# %% [markdown]
# `launch.run` calls torchrun. To do it yourself, open a terminal in the folder `runs` beside this notebook and type
#
#     torchrun --standalone --nproc-per-node=4 hello.py
#
# **`--standalone`** says that this machine is all there is. torchrun then opens the store on a free port of its own and
# gives the meeting a random name, so that two jobs on one machine cannot meet each other's ranks or fight for one port.
# Other options of the rendezvous are ignored. PyTorch 2.13 does the same without the option if you name no port and no
# second node. On two nodes the option is a mistake: each node would train alone, or with `--nnodes=2` wait in vain for
# the other (lesson 14).
#
# Older instructions start with `python -m torch.distributed.launch`. It is deprecated, and calls the same code with one
# difference: it also passes an argument to each script, `--local-rank=0` for the first rank of a machine. torchrun does
# not; a script that moves to it reads the environment variable `LOCAL_RANK` instead.
#
# The store need not be a server. It can be a **file** that all ranks can open. A file gives out no ranks and no world
# size, so the script must say both. In the next cell torchrun starts two processes, but only `RANK` is taken from it:
# they meet in `runs/meeting`.

# %%
IN_A_FILE = """\
import os
from pathlib import Path
import torch
import torch.distributed as dist

meeting = Path("runs/meeting").resolve()
rank = int(os.environ["RANK"])
dist.init_process_group(
    "gloo", init_method=f"file://{meeting}", rank=rank, world_size=2
)
x = torch.tensor(float(rank))
dist.all_reduce(x)
print(f"rank {rank} holds the sum, {x.item():g}. Is there a file? {meeting.exists()}")
dist.destroy_process_group()
"""
Path("runs/in_a_file.py").write_text(IN_A_FILE)
Path("runs/meeting").unlink(missing_ok=True)  # of a job that was killed
launch.run("runs.in_a_file", nproc=2)
print("And after the last rank has left?", Path("runs/meeting").exists())

# %% [markdown]
# The last rank that leaves removes the file. Ranks that are killed do not, and the next job then reads the addresses of
# processes that are gone: some of our tries ended with `Connection refused`, others went well by luck. So give each job
# a file of its own. On several nodes the file must be on a file system that all of them see and that can lock files.
#
# **Takeaway: a process must be told its rank, the world size and the address of a store. A job that hangs right at its
# start is usually waiting for a process that did not reach the store.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Ask the room: what if a process reads the number with `get`, adds one and writes it with `set`?
# Draw two processes that both read before either one writes: both get the same rank.
# And: who opens the store, and what happens to a running job when that process ends? (With torchrun its agent on the
# first node has the store, without it rank 0. On gloo the others notice when they need the store again, for a new group
# for example. On NCCL a thread of each rank looks into the store about once a second and logs an error at once. Either
# way the job has lost an agent or a rank, and cannot go on for long.)

# %% [markdown]
# ## 2. From one message to eight collectives (core, 22 min)
#
# The smallest exchange has one sender and one receiver. `dist.send(x, dst)` sends a tensor to rank `dst`. `dist.recv(x,
# src)` waits for a tensor from rank `src` and writes it into `x`. A message carries nothing but the numbers, so the
# receiver must bring a tensor of the right shape and type to receive into.

# %% tags=["nbval-check-output"]
def hand_over(rank):
    if rank == 0:
        x = torch.arange(3.0)
        dist.send(x, dst=1)
    else:
        x = torch.zeros(3)
    if rank == 1:
        dist.recv(x, src=0)
    return x.tolist()

for rank, held in enumerate(ranks.run(hand_over)):
    print(f"rank {rank} holds {held}")

# %% [markdown] tags=["exercise"]
# ### Exercise 1.0 · Pass it on
#
# One sender and one receiver are enough to reach everybody. Write `pass_on`: the tensor of rank 0 goes to rank 1, from
# there to rank 2, and so on, until all p ranks hold it in their `x`. The last rank has nobody to send to. About 4 lines.

# %% tags=["exercise"]
def pass_on(x, rank, p):
    """Copy rank 0's x to all p ranks, in place, from each rank to the next."""
    ### BEGIN SOLUTION
    if rank > 0:
        dist.recv(x, src=rank - 1)
    if rank < p - 1:
        dist.send(x, dst=rank + 1)
    ### END SOLUTION

# %% tags=["check"]
check("1.0", pass_on, ranks)

# %% [markdown]
# All processes had the same program, and the rank of each decided which lines it carried out. That is how every program
# in this course is written.
#
# In training, the same patterns of messages come up again and again, and each has a name. A **collective** is an
# operation that a whole set of ranks takes part in: all of them call the same function, in the same order, with tensors
# that fit together. In an all-reduce, for example, all have the same shape. Such a set of ranks is called a **process
# group**. Four collectives have a **root**: one rank that gives everything, or gets everything.
#
# In the pictures, the colour of a box says which rank its data comes from. A dotted box is room for what will arrive. A
# question mark means that the content of this tensor is not defined afterwards. Where nothing is drawn, the rank needs
# no tensor.

# %% tags=["figure"]
plot.collectives(("broadcast", "scatter", "gather", "reduce"), 4, caption="01.rooted")

# %% [markdown]
# A broadcast does what `pass_on` did. In the next cell, rank r starts with the four numbers 10 r, 10 r + 1, 10 r + 2 and
# 10 r + 3. Here are two of the four at work, with rank 0 as the root.

# %% tags=["nbval-check-output"]
def start_numbers(rank):
    return torch.arange(4) + 10 * rank

def broadcast(rank):
    x = start_numbers(rank)
    dist.broadcast(x, src=0)
    return x.tolist()

def reduce(rank):
    x = start_numbers(rank)
    dist.reduce(x, dst=0)
    return x.tolist() if rank == 0 else "not defined"

print("broadcast:", *ranks.run(broadcast))
print("reduce:   ", *ranks.run(reduce))

# %% [markdown]
# The next four collectives have no root. They are the ones that the training of large models is made of. Σ0 stands for
# the sum of the parts with number 0 of all ranks.

# %% tags=["figure"]
plot.collectives(
    ("all_gather", "all_reduce", "reduce_scatter", "all_to_all"),
    4,
    caption="01.everybody",
)

# %% [markdown]
# Let us read one of the pictures together. In a reduce-scatter, each rank's tensor has four parts. All the parts with
# number 0 are added up, and the sum ends on rank 0; the sum of the parts with number 1 ends on rank 1, and so on.
#
# For the next cell every rank starts with four other numbers: rank r has 10 (r + 1) + 0, 1, 2 and 3. So rank 0 has 10,
# 11, 12 and 13, and rank 3 has 40, 41, 42 and 43. After the reduce-scatter rank 1 then holds 11 + 21 + 31 + 41 = 104.
#
# **Predict.** What does **rank 2** hold: the first number after an all-reduce, its only number after a reduce-scatter,
# and the last number after an all-to-all?

# %% tags=["predict"]
first_after_all_reduce = 10 + 20 + 30 + 40
only_after_reduce_scatter = 12 + 22 + 32 + 42
last_after_all_to_all = 42

# %% tags=["nbval-check-output"]
def other_numbers(rank):
    return torch.arange(4) + 10 * (rank + 1)

def all_reduce(rank):
    x = other_numbers(rank)
    dist.all_reduce(x)
    return x.tolist()

def reduce_scatter(rank):
    x = other_numbers(rank)
    own_sum = torch.zeros(1, dtype=x.dtype)
    dist.reduce_scatter(own_sum, list(x.chunk(4)))
    return own_sum.tolist()

def all_to_all(rank):
    x = other_numbers(rank)
    swapped = torch.zeros_like(x)
    dist.all_to_all_single(swapped, x)
    return swapped.tolist()

summed = ranks.run(all_reduce)[2]
own_sum = ranks.run(reduce_scatter)[2]
swapped = ranks.run(all_to_all)[2]
way = {"within": 1, "found": "computed"}
compare("all-reduce, first", first_after_all_reduce, summed[0], **way)
compare("reduce-scatter, only", only_after_reduce_scatter, own_sum[0], **way)
compare("all-to-all, last", last_after_all_to_all, swapped[3], **way)
print("rank 2 holds", summed, "after all_reduce,", own_sum, "after reduce_scatter,")
print("and", swapped, "after all_to_all")

# %% [markdown]
# Now look at reduce-scatter and all-gather one after the other. After the reduce-scatter, rank i holds the finished sum
# of part i. An all-gather of these finished parts then gives every rank all sums, and that is what an all-reduce does:
#
# $$\text{all-reduce} = \text{reduce-scatter, then all-gather.}$$
#
# You will build the all-reduce from its two halves in a moment. Later in the course there are ways of training in which
# a rank needs only its own part of the sum; they use the first half alone, and never need the memory for the rest.
#
# `dist.all_gather` and `dist.reduce_scatter` take lists of tensors. Where the parts lie one after the other in a single
# tensor, as they do in a library, PyTorch 2.13 calls them `all_gather_single` and `reduce_scatter_single`. In older code
# you will read `all_gather_into_tensor` and `reduce_scatter_tensor`, which still work and warn.
#
# A ninth operation sends no data at all: a **barrier** returns when all ranks of the group have called it. We use it
# below so that all ranks start a measurement together.
#
# ### Groups: whose number is it?
#
# So far all ranks took part. A function that is given no group uses the group of all ranks, the **world**. A group of
# some ranks is made by `dist.new_group`, which **all** ranks call, also those that will not be in it.
#
# Within a group the ranks are numbered anew, from 0. So in a group of the ranks 1, 2 and 3, rank 1 has the number 0.
# Some arguments of PyTorch's functions are ranks of the world, others are numbers within the group:
#
# | in PyTorch | which number it is |
# |---|---|
# | `dist.get_rank()` | rank of the world; `ranks.run` gives you the same as `rank` |
# | `dist.get_rank(group)` | number within the group; -1 on a rank that is not in it |
# | `dst=`, `src=` | rank of the world, also if you give a group |
# | `group_dst=`, `group_src=`, `group_peer=` | number within the group |
#
# A group also knows which library sends its tensors, its **backend**: gloo for tensors in a CPU's memory, as here, and
# NCCL (say "nickel") for tensors on NVIDIA's GPUs. Your program makes the same calls in both cases.
#
# **Takeaway: a collective is a contract. All ranks of the group make the same call, in the same order, with tensors
# that fit together. What a rank then holds can be read from the picture.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Let the room draw scatter and all-to-all on the board before the figure is shown. A frequent
# mistake in the prediction is 40 instead of 100 for the all-reduce: people take the last rank's number for the sum.
# Ask: which two collectives are each other's opposite? (scatter and gather; broadcast and reduce; all-gather and
# reduce-scatter. Tensor parallelism needs that for backward.) The table of numbers saves an hour later on: `src=0` in a
# group without rank 0 is a mistake that comes back from lesson 08 on.

# %% [markdown]
# ## 3. A star and a ring (core, 9 min)
#
# How would you add up a tensor of n bytes over p ranks? The obvious way is a **star**: all ranks send their tensors to
# rank 0, which adds them up and sends the sum back to each of them. That works, but all bytes pass through rank 0, while
# the others wait.
#
# The **ring** has no such centre. Each rank sends only to its right neighbour, and receives only from its left
# neighbour. The tensor is cut into p chunks. In each step every rank passes one chunk on, and all ranks do so at the
# same time.

# %% tags=["figure"]
plot.ring(4, caption="01.ring")

# %% [markdown]
# Each small square is one chunk on one rank: a row is a rank, a column is a chunk. The stripes say whose numbers have
# been added up in it, from left to right in the order of adding: each chunk begins its way on a different rank. A thick
# frame marks the chunk that has just arrived.
#
# - **Steps 1 to 3 are a reduce-scatter.** In step 1, rank 0 sends its chunk 0 to rank 1, which adds it to its own chunk
#   0. At the same time rank 1 sends its chunk 1 to rank 2, and so on. In step 2, rank 1 passes on chunk 0, which now
#   holds two contributions. After p - 1 steps every rank has one chunk with all contributions: rank r has chunk r + 1
#   (and the last rank has chunk 0). A library starts one chunk earlier, so that rank r ends with chunk r, as in the
#   picture of reduce-scatter.
# - **Steps 4 to 6 are an all-gather.** The finished chunks go round once more, and now they are copied.
#
# In each step, of either kind, a rank sends one chunk.
#
# **Predict.** Four ranks add up a tensor of 1 MiB, which is 2²⁰ bytes. How many bytes does rank 0 send as the centre of
# a star? How many bytes does it send on the ring? (Write numbers of bytes: `5 * 2**20` stands for 5 MiB.)

# %% tags=["predict"]
rank_0_on_the_star = (4 - 1) * 2**20
rank_0_on_the_ring = 2 * (4 - 1) * 2**20 / 4

# %% [markdown]
# `labcode.comm.ring` has both, and both return the bytes that a rank sent. Don't look at its source yet: it is what you
# write in section 4.

# %% tags=["nbval-check-output"]
def count_bytes(rank):
    x = torch.arange(2.0**18) + rank  # 2**18 numbers of 4 bytes are 1 MiB
    by_star = x.clone()
    by_ring = x.clone()
    star_bytes = ring.star_all_reduce(by_star, dist.group.WORLD)
    ring_bytes = ring.all_reduce(by_ring, dist.group.WORLD)
    dist.all_reduce(x)
    equal = torch.equal(x, by_star) and torch.equal(x, by_ring)
    return star_bytes, ring_bytes, equal

star_bytes, ring_bytes, equal = zip(*ranks.run(count_bytes))
way = {"within": 1, "unit": "B", "found": "counted"}
compare("rank 0 on the star", rank_0_on_the_star, star_bytes[0], **way)
compare("rank 0 on the ring", rank_0_on_the_ring, ring_bytes[0], **way)
print("star, ring and dist.all_reduce give the same sum:", all(equal))
print(f"all ranks together send {sum(star_bytes):,} bytes on the star")
print(f"all ranks together send {sum(ring_bytes):,} bytes on the ring")

# %% [markdown]
# The ring does not save a single byte: both ways send 2 (p - 1) n bytes in all. But on the ring every rank sends the
# same share, and all links are busy at the same time. In each of the 2 (p - 1) steps a rank sends a chunk of n/p bytes.
# That makes 2 (p - 1)/p · n bytes: 1.5 n with four ranks, and never more than 2 n, however many ranks there are. In the
# centre of a star, rank 0 sends (p - 1) n, which is 1023 n with 1024 ranks.
#
# Can it be done with fewer bytes? As long as only the ranks themselves add, it cannot: in any such method some rank
# sends at least 2 (p - 1)/p · n (Patarasuk and Yuan 2009). Some networks have switches that add the numbers on their
# way, which NVIDIA calls SHARP; there a rank needs to send its tensor only once.
#
# **Takeaway: in a ring all-reduce each rank sends 2 (p - 1)/p · n bytes, which hardly depends on p.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Let somebody play the ring with four people and four coloured cards each; it is faster than any
# explanation. Ask the room: after step 2, which rank could already stop? (None, every chunk is still missing a
# contribution somewhere.)

# %% [markdown]
# ## 4. Write the ring (core, 27 min)
#
# In every step sending and receiving must happen **at the same time**. Suppose that all ranks first send to the right,
# and wait until their tensor has been taken. Then no rank ever gets to its receive, and all wait forever. This is a
# **deadlock**.
#
# `exchange` avoids it: it starts both, and then waits for both. `P2POp` describes one message, from point to point;
# `isend` and `irecv` are the forms of send and receive that return at once; and `batch_isend_irecv` starts all messages
# of a list. The neighbours are numbers within the group, so it works in any group.

# %%
def exchange(outgoing, incoming, group):
    """Send to the right neighbour; at the same time receive from the left one."""
    rank = dist.get_rank(group)  # the number within the group
    p = dist.get_world_size(group)
    right = (rank + 1) % p
    left = (rank - 1) % p
    send = dist.P2POp(dist.isend, outgoing, group=group, group_peer=right)
    receive = dist.P2POp(dist.irecv, incoming, group=group, group_peer=left)
    for message in dist.batch_isend_irecv([send, receive]):
        message.wait()

# %% [markdown] tags=["exercise"]
# ### Exercise 1.1 · The first half: reduce-scatter
#
# Complete the function with `exchange`. `chunks` is a list of p tensors of the same size. Afterwards the rank with
# number r in the group must have the finished sum in `chunks[(r + 1) % p]`. Which chunk a rank sends in a step follows
# from the picture: write down what rank 0 and rank 1 send in steps 1, 2 and 3, and find the rule.
#
# The sums must be written into the tensors that are in the list, because in the next exercise these will be parts of
# one large tensor: `a += b` changes the tensor a, while `a = a + b` makes a new one. The check tries the group of all
# ranks, and the group of the ranks 1, 2 and 3. Call `hint("1.1")` if you are stuck.

# %% tags=["exercise"]
def reduce_scatter_half(chunks, group):
    """Add up each chunk on its way round the ring, in place."""
    rank = dist.get_rank(group)
    p = dist.get_world_size(group)
    arrived = torch.empty_like(chunks[0])  # room for what comes from the left
    for step in range(p - 1):
        ### BEGIN SOLUTION
        outgoing = chunks[(rank - step) % p]
        growing = chunks[(rank - step - 1) % p]
        exchange(outgoing, arrived, group)
        growing += arrived
        ### END SOLUTION

# %% tags=["check"]
check("1.1", reduce_scatter_half, ranks)

# %% [markdown] tags=["exercise"]
# ### Exercise 1.2 · The whole all-reduce
#
# Now write all of it: cut `x` into p chunks, add them up on the ring, and pass the finished chunks on until every rank
# has all of them. Afterwards `x` itself must hold the sum; what the function returns does not matter. You may assume
# that p divides the number of elements.
#
# `x.view(-1)` is the same memory seen as one long row, and `.chunk(p)` cuts a row into p parts without copying it. It
# gives a tuple, which `list(...)` turns into the list of exercise 1.1. What arrives in the second half can be received
# straight into its place.
#
# If you skipped exercise 1.1, call `ring.reduce_scatter_phase(chunks, group)` for the first half.

# %% tags=["exercise"]
def ring_all_reduce(x, group):
    """Replace x by its sum over the group, in place."""
    ### BEGIN SOLUTION
    rank = dist.get_rank(group)
    p = dist.get_world_size(group)
    chunks = list(x.view(-1).chunk(p))
    reduce_scatter_half(chunks, group)
    for step in range(p - 1):
        finished = chunks[(rank + 1 - step) % p]
        next_finished = chunks[(rank - step) % p]
        exchange(finished, next_finished, group)
    ### END SOLUTION

# %% tags=["check"]
check("1.2", ring_all_reduce, ranks)

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Most of the time goes to the exercises. What people get wrong: they send a chunk of the wrong
# number (the sums are then a mixture of two or three contributions), they use the world's rank where the group's is
# meant (right on four ranks, a hang or an error on the group of three), they add in the second half, or they work on
# copies (`x.view(-1).clone()`, or `torch.cat` into a new tensor) and leave `x` as it was. Those who finish early can
# make the chunks uneven: `tensor_split` instead of `chunk`, and a smaller part of `arrived`.

# %% [markdown]
# Does PyTorch's own `dist.all_reduce` send as many bytes as the ring? It does not say, so we ask the operating system.
# On one machine all messages go through the **loopback device**, a network device that leads back to the same machine,
# and it counts the bytes of all ranks together.

# %%
def count_on_loopback(rank):
    x = torch.ones(2**20)  # 2**20 numbers of 4 bytes are 4 MiB
    dist.barrier()
    before = ring.loopback_bytes()
    dist.barrier()
    dist.all_reduce(x)
    dist.barrier()
    return ring.loopback_bytes() - before

counted_bytes = ranks.run(count_on_loopback)[0]
print(f"counted for dist.all_reduce: {counted_bytes / 1e6:.2f} MB")
print(f"four ranks on a ring:        {4 * 1.5 * 4 * 2**20 / 1e6:.2f} MB")

# %% [markdown]
# The device counted the 6 n bytes of a ring, and a little more: each packet has a header, and other programs use the
# device too. A star would have sent as many in all; that gloo uses a ring is written in its source (see Sources).
#
# **Takeaway: the ring is p - 1 steps of adding and p - 1 steps of copying. PyTorch's all-reduce on CPUs sends the same
# number of bytes as yours.**

# %% [markdown]
# ## 5. A broadcast in few rounds (optional, 22 min)
#
# How does a tensor get from one rank to all others? If the root sends it to one rank after the other, that takes p - 1
# rounds, and in each of them all ranks but two have nothing to do. It is faster if every rank that already has the
# tensor helps to spread it. In the picture a filled circle is a rank that has the tensor.

# %% tags=["figure"]
plot.rounds(
    [[(0, 1)], [(0, 2), (1, 3)], [(0, 4), (1, 5), (2, 6), (3, 7)]],
    8,
    caption="01.tree",
)

# %% [markdown]
# Drawn with the root on top and each rank below the one it got the tensor from, this is a **tree**. Eight ranks need 3
# rounds, where the root alone would need 7.
#
# **Predict.** The root alone needs 999 rounds for 1000 ranks. How many does the tree need?

# %% tags=["predict"]
rounds_of_the_tree = 10

# %% [markdown]
# We play it: in each round every rank that has the tensor gives it to one that still waits.

# %% tags=["nbval-check-output"]
have_it = [0]
waiting = list(range(1, 1000))
after_round = []  # how many ranks have the tensor
while waiting:
    served = waiting[: len(have_it)]  # one for each rank that has the tensor
    waiting = waiting[len(have_it) :]
    have_it = have_it + served
    after_round.append(len(have_it))
compare("rounds", rounds_of_the_tree, len(after_round), within=1, found="simulated")
for number, num_ranks in enumerate(after_round, 1):
    print(f"after round {number}: {num_ranks} ranks have the tensor")

# %% [markdown]
# The number of ranks that have the tensor doubles in each round. So p ranks need log₂ p rounds, rounded up.

# %% [markdown] tags=["exercise"]
# ### Exercise 1.3 · Write the tree
#
# Write the broadcast with `dist.send(x, group=group, group_dst=...)` and `dist.recv(x, group=group, group_src=...)`.
# `root` is a number within the group. The check looks at your messages and asks four things of them:
#
# 1. Afterwards every rank holds the root's tensor, in `x` itself, for any root.
# 2. No collective is used, and each rank but the root receives the tensor exactly once.
# 3. It takes as few rounds as possible: 2 for three or four ranks.
# 4. It works for a group of any size. Besides three and four ranks, the check plays it for more, also for more than
#    eight, and looks at who would send to whom.
#
# There is more than one way. If you get stuck, write it for root 0 and four ranks first. Then ask yourself what each
# rank's place would be if the ranks were counted from the root.

# %% tags=["exercise"]
def tree_broadcast(x, root, group):
    """Copy the root's x to all ranks of the group, in place, in few rounds."""
    ### BEGIN SOLUTION
    p = dist.get_world_size(group)
    place = (dist.get_rank(group) - root) % p  # the root has place 0
    have_it = 1  # the places 0 to have_it - 1 hold the tensor
    while have_it < p:
        if place < have_it and place + have_it < p:
            dist.send(x, group=group, group_dst=(place + have_it + root) % p)
        elif have_it <= place < 2 * have_it:
            dist.recv(x, group=group, group_src=(place - have_it + root) % p)
        have_it *= 2
    ### END SOLUTION

# %% tags=["check"]
check("1.3", tree_broadcast, ranks)

# %% [markdown]
# **Takeaway: a tree needs log₂ p rounds instead of p - 1, because every rank that has the tensor helps. It sends the
# whole tensor in each round, so it is the right choice for small tensors, where rounds count more than bytes.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Two solutions are common: from near to far, as above, and from far to near (the root sends
# across the middle first), which has `distance` halve in each round. Both are right. Typical mistakes: only powers of
# two (the last ranks of three wait forever), the root ignored, `have_it` never doubled (the check stops the loop after
# 20 s). Ask the room for the tree of a *reduce*. (The same picture, read from right to left, with an addition.)

# %% [markdown]
# ## 6. What does it cost? (core, 15 min)
#
# Every message costs some time before its first byte arrives: the sending process has to call the network, and the
# receiving one has to wake up. This is the **latency** α, in seconds. After that, the bytes flow at some speed, the
# **bandwidth** β, in bytes per second. So a message of n bytes takes
#
# $$t = \alpha + \frac{n}{\beta}.$$
#
# This is the **alpha-beta model**. The ring all-reduce makes 2 (p - 1) steps, one after the other, and in each of them a
# rank sends n/p bytes. With the latency and the bytes of all steps added up, it takes
#
# $$t(n) = 2(p-1)\,\alpha + \frac{2(p-1)}{p}\,\frac{n}{\beta}.$$
#
# For example, take p = 4, α = 50 µs and β = 1 GB/s. A tensor of 1 MB takes 6 · 50 µs + 1.5 · 1 MB / (1 GB/s) = 0.3 ms +
# 1.5 ms = 1.8 ms.
#
# The model has two unknowns, so two measurements are enough to find them. `call_times` makes a call twenty times on
# each rank, with a barrier before each. A collective is done when its slowest rank is done. Of the twenty we take the
# median. One small call is too short to be timed well, so we make 64 of them in a row, and divide.

# %%
from labcode.comm.timing import call_times
from labcode.perf import alpha_beta
from labcode.runtime.units import seconds

WORDS = ("about as long", "up to five times as long", "more than five times as long")


def in_words(ratio):
    """Says a ratio of two times; up to 1.75 they are about as long."""
    if ratio > 5:
        return WORDS[2]
    if ratio > 1.75:
        return WORDS[1]
    return WORDS[0]

def usual_s(call, num_bytes):
    """Seconds of a call until the slowest rank is done: the median of twenty."""
    times_of_ranks = ranks.run(call_times, call, num_bytes)
    times = [max(times_of_one_call) for times_of_one_call in zip(*times_of_ranks)]
    return sorted(times)[len(times) // 2]

def all_reduce_once(x):
    dist.all_reduce(x)

def one_by_one(x):
    for part in x.chunk(64):
        dist.all_reduce(part)

small_s = usual_s(one_by_one, 64 * 2**10) / 64
large_s = usual_s(all_reduce_once, 2**24)
link = alpha_beta.fit("all_reduce", 4, [2**10, 2**24], [small_s, large_s])
print(f"1 KiB takes {seconds(small_s)}, 16 MiB take {seconds(large_s)}")
print(f"alpha = {seconds(link.alpha_s)}, beta = {si(link.beta_bytes_per_s, 'B/s')}")

# %% [markdown]
# From these two the model predicts every other size. Does it agree with what is measured in between?

# %% tags=["figure"]
sizes = [2**k for k in range(10, 25, 2)]
measured_s = [usual_s(all_reduce_once, n) for n in sizes]
model_s = [alpha_beta.time_s("all_reduce", 4, n, link) for n in sizes]
plot.lines(
    {"measured": [1e3 * t for t in measured_s], "model": [1e3 * t for t in model_s]},
    x=sizes,
    reference={"latency, 6 alpha": 6e3 * link.alpha_s},
    upright={"n = p alpha beta": alpha_beta.balance_bytes("all_reduce", 4, link)},
    caption="01.sizes",
)

# %% [markdown]
# On the left the model is flat, because nearly all the time is latency. On the right the time grows in proportion to
# the size. Both parts cost the same where 2 (p - 1) α = 2 (p - 1)/p · n/β, which is at **n = p α β**, the dotted line.
#
# Small tensors scatter around the model: α comes from 64 calls in a row, and each point here is a single call after a
# barrier, which the ranks do not leave all at the same time. In the middle the points can lie below it, since the model
# does not know that gloo cuts a tensor into pieces and adds up one piece while the next is on its way. Large tensors can
# lie above it: the largest one fixed β a moment ago, and where it takes longer now, the machine is probably busier. The
# model also leaves out that here four ranks share the cores that copy every byte, while on a cluster each has its own.
#
# And your ring? It is a dozen lines of Python, while PyTorch's all-reduce on CPUs is a library in C++.
#
# **Predict.** How long does your ring take for 16 MiB, compared with `dist.all_reduce`? Write `"about as long"`, `"up to
# five times as long"` or `"more than five times as long"`.

# %% tags=["predict"]
my_ring_takes = "about as long"

# %%
from course.lab import yours

my_ring = yours("1.2", ring.all_reduce)

def by_my_ring(x):
    my_ring(x, dist.group.WORLD)

def times_as_long(num_bytes):
    """Of my ring, beside PyTorch's all-reduce: the middle one of three comparisons."""
    ratios = []
    for _ in range(3):
        mine_s = usual_s(by_my_ring, num_bytes)
        theirs_s = usual_s(all_reduce_once, num_bytes)
        ratios.append(mine_s / theirs_s)
    return sorted(ratios)[1]

large = times_as_long(2**24)
small = times_as_long(2**10)
compare("my ring for 16 MiB", my_ring_takes, in_words(large), options=WORDS)
print(f"my ring takes {large:.1f} times as long for 16 MiB, and {small:.1f} for 1 KiB")

# %% [markdown]
# For a large tensor the time goes into moving the bytes and adding them up, and your ring moves as many as theirs. The
# lines of Python cost some microseconds a step. Only a small tensor can notice that, and only where α is not much
# longer: where it is hundreds of microseconds, the small tensor takes about as long too. The algorithm decides, not the
# language.
#
# A model has hundreds of gradients, and many of them are small. Is it better to send 64 tensors of 16 KiB one by one,
# or all together, as one **bucket** of 1 MiB?
#
# **Predict** with the model: how long do the 64 small ones take, compared with the large one? Write one of the same
# three answers.

# %% tags=["predict"]
small_ones = "more than five times as long"

# %%
ratio = usual_s(one_by_one, 2**20) / usual_s(all_reduce_once, 2**20)
compare("64 small ones", small_ones, in_words(ratio), options=WORDS)

one_small_s = alpha_beta.time_s("all_reduce", 4, 2**14, link)
one_large_s = alpha_beta.time_s("all_reduce", 4, 2**20, link)
model_ratio = 64 * one_small_s / one_large_s
print(f"by the model {model_ratio:.0f} times, measured {ratio:.0f} times")

# %% [markdown]
# The 64 small tensors have as many bytes as the large one, but their calls pay the latency 64 times. (By the model they
# cannot take more than 64 times as long. Where yours do, the two measurements scatter.)
#
# **Takeaway: below p α β bytes you pay for the number of messages, and above it for their bytes. So small tensors
# should travel together.** Section 1 of lesson 05 builds on this.

# %% [markdown] tags=["solution-only"]
# *For the instructor.* A good question for the board: how large must a bucket be, so that latency takes only a fraction
# s of the time? With L = 2 (p - 1) α, we want s · t = L, so t - L = L (1 - s)/s. The left side is 2 (p - 1)/p · n/β, and
# so n = p α β (1 - s)/s. At s = 1/2 this is p α β. The common mistake is to forget that t contains L itself. And: why
# is the measured curve sometimes below the model in the middle? (The two points that fix the model are its ends.)

# %% [markdown]
# ## 7. Broken on purpose (core, 19 min)
#
# The contract of section 2 can be broken in three ways: a rank does not take part, a rank makes a different call, or a
# rank brings a different tensor. It helps to have seen all three before they happen to you on a cluster.
#
# **A rank does not take part.** Only rank 0 prints the loss, so why should the others bother to compute its mean? The
# group here gives up after 2 seconds. By default gloo waits for 30 minutes, and NCCL for 10.

# %% tags=["raises-exception"] raises="RankError: rank 0: RuntimeError: ... Timed out waiting"
from datetime import timedelta


def mean_loss_for_the_log(rank):
    group = dist.new_group(timeout=timedelta(seconds=2))
    loss = torch.tensor(float(rank))
    if rank == 0:  # only rank 0 prints it
        dist.all_reduce(loss, group=group)
    return loss.item() / 4

ranks.run(mean_loss_for_the_log)

# %% [markdown]
# "Timed out waiting" is said by the rank that **waited**. It did nothing wrong, and it does not know for whom it
# waited. On a cluster you see this message first, and the rank to look for is one of those that are silent. (What
# follows, about the ranks that have finished, is added by the pool of this course.) On gloo there is a way to find out:
# in `dist.monitored_barrier(group, wait_all_ranks=True)` rank 0 collects a sign of life from every rank, and names
# those that sent none.
#
# **A rank makes a different call.** Here rank 3 calls broadcast while the others call all-reduce.

# %% tags=["raises-exception"] raises="RankError: ...called all_reduce of float32 [6], rank 3 called broadcast of float32 [6] from rank 3"
def two_different_calls(rank):
    x = torch.ones(6)
    if rank == 3:
        dist.broadcast(x, src=3)
    else:
        dist.all_reduce(x)

ranks.run(two_different_calls)

# %% [markdown]
# This line comes from the pool, which compares the calls of its ranks before they start. PyTorch by itself does not
# look: the messages of the two collectives would be mixed up, and you would get a hang, wrong numbers, or a crash of
# the process. The same happens if the tensors have different **sizes**.
#
# **A rank brings a different tensor.** Every rank holds the same weight here, so the sum should be four times that. But
# rank 3 holds it transposed: the same number of elements in a different shape.

# %% tags=["nbval-check-output"]
def add_up_a_weight(rank, group=None):
    weight = torch.arange(6.0).view(2, 3)
    if rank == 3:
        weight = weight.T.contiguous()
    dist.all_reduce(weight, group=group)
    return weight.flatten().tolist()

print("expected", [4.0 * i for i in range(6)])
print("found   ", ranks.run(add_up_a_weight)[0])

# %% [markdown]
# There was no error, and the numbers are wrong: the memory of one shape was added to that of the other. This is the
# worst of the three, because nobody notices.
#
# PyTorch can compare names and shapes of all calls, at the price of one more exchange for each call. In a job you ask
# for that by setting `TORCH_DISTRIBUTED_DEBUG=DETAIL` before the ranks start. Here it is enough to make a group in this
# mode.

# %% tags=["raises-exception"] raises="RankError: rank ... RuntimeError: Detected mismatch between collectives on ranks"
def add_up_a_weight_watched(rank):
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    group = dist.new_group(timeout=timedelta(seconds=5))
    dist.set_debug_level(dist.DebugLevel.OFF)
    return add_up_a_weight(rank, group)

ranks.run(add_up_a_weight_watched)

# %% [markdown]
# The message is long, but it has what you need: two ranks, what each of them was running, and at its end the
# difference, the shapes 2 × 3 and 3 × 2.
#
# At work you will meet these failures through NCCL, which sounds different. PyTorch runs a **watchdog** for it, a
# thread of its ProcessGroupNCCL that watches the collectives. When one has not ended in time, the watchdog ends the
# process, and the log says something like
#
#     Watchdog caught collective operation timeout: WorkNCCL(SeqNum=812, OpType=ALLREDUCE,
#     NumelIn=1048576, NumelOut=1048576, Timeout(ms)=600000) ran for 600029 milliseconds
#
# `SeqNum` counts the collectives of a group. Near this message each rank also logs the number of the last collective
# that it **enqueued**, and of the last one that it **completed**. Compare the ranks: the one whose last enqueued number
# is lowest did not take part. It may be missing from the log altogether, because a rank that waits for no collective
# has nothing to report. PyTorch also keeps the last calls of each rank in a **flight recorder**, which lesson 14,
# section 6, reads.
#
# | what you see | what it usually is | what to do next |
# |---|---|---|
# | hang, then "Timed out waiting", or the watchdog | a rank skipped the call, or died | find the rank that is silent, or whose last enqueued number is lowest; look for an `if rank == ...` |
# | hang, and no message yet | the same | `py-spy dump --pid PID` shows the line at which a process is (`pip install py-spy`) |
# | "Connection closed by peer", "remote process exited" | another rank failed first | sort the log by time and read the first error |
# | wrong numbers without an error | shapes differ | `TORCH_DISTRIBUTED_DEBUG=DETAIL`, with a small job |
# | "Detected mismatch", or a hang after some steps | the order of the calls differs | look for a branch that depends on a rank's own data |
# | hang at the start | the rendezvous is incomplete | compare the world size with the number of processes that were started |
#
# **Takeaway: the rank that reports an error is often not the one that made it. First ask which rank is missing, then
# which rank called something else or brought a different shape.**

# %% [markdown] tags=["exercise"]
# ### Exercise 1.4 · Fix it
#
# Fix `mean_loss_for_the_log` so that no rank waits forever. The rank with number 0 in the group returns the mean over
# the group, as a number or a tensor, and the others return `None`. Any collective that brings the sum to number 0
# will do. The training loop still needs the `loss` that it passes to you, so leave that tensor as it is. (Here it is a
# plain number. A real loss has the graph for backward; `loss.detach()` is the same number in the same memory, without
# the graph.)

# %% tags=["exercise"]
def mean_loss(loss, group):
    """The mean of `loss` over the group, on the group's number 0; None elsewhere."""
    ### BEGIN SOLUTION
    total = loss.clone()
    dist.all_reduce(total, group=group)
    if dist.get_rank(group) == 0:
        return total / dist.get_world_size(group)
    return None
    ### END SOLUTION

# %% tags=["check"]
check("1.4", mean_loss, ranks)

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Common mistakes in the exercise: the all-reduce within the `if`, the loss changed in place,
# division by 4, and `if dist.get_rank() == 0` where the group does not contain rank 0. Ask the room which of the three
# failures they would notice first in a training run. (The hang at once, the crash at once, the wrong numbers perhaps
# never.)

# %% [markdown]
# ## 8. From here to GPUs and SLURM (core, 3 min)
#
# Nothing above depends on the CPU. In the script of section 1, "nccl" replaces "gloo", and each rank puts its tensors on
# a GPU of its own, `torch.device("cuda", int(os.environ["LOCAL_RANK"]))`; torchrun sets `LOCAL_RANK` as well.
# `init_process_group` does not read the variables of SLURM, which have different names. `world = bootstrap.start()` from
# `labcode.comm` reads those of torchrun and of srun, and chooses `world.device` and the backend. (Under srun the job
# script has to set `MASTER_ADDR` and `MASTER_PORT`: lesson 14, section 2.) What changes are α and β.
#
# NCCL does not send everything round one ring. It makes several at once, so that all links of a GPU and all network
# adapters of a node carry a part of the tensor: a node of eight GPUs with an adapter each sends through all eight. For
# small tensors on many nodes it uses a pair of trees instead of rings. Their latency grows with the logarithm of the
# number of nodes, as that of the tree in section 5 does (Jeaugey 2019). NCCL chooses between them by the size of the
# tensor and by what it knows of the links.
#
# Tables of such measurements usually do not print α and β, but two bandwidths. The **algorithm bandwidth** is the size
# of the tensor divided by the time. The **bus bandwidth** is 2 (p - 1)/p times as much for an all-reduce. On a ring this
# is what a link really carried, and it can be compared with the datasheet of the link, whatever the number of ranks.
# Where switches do the adding (SHARP, or NVLink SHARP within a node), fewer bytes are sent than the formula says, and
# the bus bandwidth can come out above what the link can carry.
#
# For example, an all-reduce of 1 GiB on 8 A100 with NVLink took 8203.9 µs (Bekman, see Sources). That is an algorithm
# bandwidth of 2³⁰ B / 8203.9 µs = 130.9 GB/s, and a bus bandwidth of 14/8 times as much, 229 GB/s. All NVLinks of an
# A100 together carry 300 GB/s in each direction (same source), so three quarters of that were used.
#
# ## Questions (core, 3 min)
#
# **1.** A ring all-reduce on 512 ranks and one on 8 ranks, each of 1 GB, on links of the same α and β. Which takes
# longer, and by how much?
#
# <details><summary>Answer</summary>
#
# The bytes are nearly the same: 2 · 511/512 against 2 · 7/8, which is 14 % more. The latency is 1022 α against 14 α.
# For 1 GB on a fast link the first part decides; for small tensors the second does, and the ring of 512 takes 73 times
# as long. That is why NCCL uses trees for those.
# </details>
#
# **2.** Which of these hang: (a) rank 2 calls all-reduce twice, the others once; (b) all ranks call all-reduce, rank 2
# ten seconds late; (c) rank 2 calls all-reduce on a tensor of zeros?
#
# <details><summary>Answer</summary>
#
# (a) hangs: the second call of rank 2 waits for the others, or meets a later all-reduce of theirs and adds up the wrong
# tensors. (b) only waits. (c) is correct, and it is a good way to let a rank without data take part.
# </details>
#
# **3.** From lesson 00: one rank holds three losses with mean 10, another holds a single loss, 2. What is the mean of
# all losses, and what would each rank have to put into an all-reduce to find it?
#
# <details><summary>Answer</summary>
#
# (3 · 10 + 2)/4 = 8, not 6, which is the mean of the two means. Each rank puts in its sum and its count: (30, 3) and
# (2, 1). The all-reduce gives (32, 4) to both.
# </details>
#
# ## Recap
#
# | concept | formula or fact | in labcode |
# |---|---|---|
# | rank, world size, store | `get` waits, `add` counts in one step; `dist.init_process_group` | `runtime.bootstrap` |
# | group | `src`, `dst` are ranks of the world; `group_src`, `group_dst` count in the group | `comm.grid` |
# | all-reduce | reduce-scatter, then all-gather | `comm.ring` |
# | bytes a rank sends on a ring | 2 (p - 1)/p · n; half of it for each phase | `perf.alpha_beta.bytes_sent` |
# | broadcast by a tree | log₂ p rounds, rounded up | |
# | time on a ring | 2 (p - 1) α + 2 (p - 1)/p · n/β | `perf.alpha_beta.time_s`, `fit` |
# | latency and bandwidth cost the same | n = p α β | `perf.alpha_beta.balance_bytes` |
# | bus bandwidth | 2 (p - 1)/p · n / t | |
# | a rank is missing | `monitored_barrier` names it (gloo); silent, or the lowest number enqueued (NCCL) | |
# | shapes or calls differ | `TORCH_DISTRIBUTED_DEBUG=DETAIL` | `course.pool.record` |
#
# ## Sources
#
# - Hockney 1994, *The communication challenge for MPP*, Parallel Computing 20(3): the model of latency and bandwidth.
# - Thakur, Rabenseifner, Gropp 2005, *Optimization of collective communication operations in MPICH*, IJHPCA 19(1):
#   trees, rings and recursive doubling, and what they cost. Like many texts it writes β for the seconds per byte: there
#   a message takes α + n β.
# - Patarasuk, Yuan 2009, *Bandwidth optimal all-reduce algorithms for clusters of workstations*, JPDC 69(2), doi
#   10.1016/j.jpdc.2008.09.002: the ring, and why some rank must send at least as much.
# - gloo's all-reduce is a ring unless another algorithm is asked for: github.com/facebookincubator/gloo,
#   `gloo/allreduce.cc`.
# - Times and bus bandwidth on A100, and what its NVLinks carry: S. Bekman, *Machine Learning Engineering*,
#   network/README.md, github.com/stas00/ml-engineering, measured with nccl-tests.
# - Rings and trees in NCCL: S. Jeaugey 2019, *Massively Scale Your Deep Learning Training with NCCL 2.4*, NVIDIA's
#   technical blog.
# - What bus bandwidth means: github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md.
# - Debugging: docs.pytorch.org/docs/stable/distributed.html, `monitored_barrier` and `TORCH_DISTRIBUTED_DEBUG`; the
#   watchdog's message is in PyTorch's ProcessGroupNCCL.cpp.
# - torchrun, `--standalone` and `torch.distributed.launch`: PyTorch 2.13, `torch/distributed/run.py` and `launch.py`. A
#   file as the store: https://docs.pytorch.org/docs/stable/distributed.html#shared-file-system-initialization

# %%
ranks.close()
