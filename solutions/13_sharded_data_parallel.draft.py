# A draft of lesson 13: text, exercises and their solutions. Not yet executed; the checks
# (labcode/teach/exercises/l13.py), the figures plot.zero and plot.units and the kept answers are
# missing. When they are there the file loses ".draft" and gets its jupytext head.

# %% [markdown]
# # 13 · Sharded data parallel: ZeRO and FSDP
#
# Data parallelism copies the whole model to every rank. Each copy of it holds the same weights, computes the same
# update and keeps the same optimizer state. In this lesson you remove the copies, one kind after the other, until no
# two ranks keep the same byte. What you end up with is what PyTorch calls FSDP and DeepSpeed calls ZeRO.
#
# ## Goals
#
# - predict what a rank keeps for weights, gradients and optimizer at each stage of ZeRO, and measure it;
# - write an optimizer whose state is divided over the ranks;
# - write a layer that owns a part of its weight and borrows the rest, in forward and in backward;
# - count what each stage sends, and say when sharding is better than tensor parallelism and when it is not;
# - choose units, prefetch, resharding and hybrid sharding for a model and a cluster.
#
# **Time**: 100 minutes in two sittings: sections 1 to 3 (50 minutes) divide the optimizer and the gradients, and
# sections 4 to 6 (50 minutes) divide the weights. **Needs**: lessons 04 and 05 (data parallel), lesson 01 (collectives
# and their bytes); section 6 uses lesson 09.

# %% [markdown]
# ## 1. What data parallelism keeps p times
#
# Take a model with N parameters, trained with AdamW in mixed precision: products are computed in 16-bit numbers, and
# the optimizer works on 32-bit copies of the weights, which are called **master weights**. For each parameter a rank
# keeps
#
# | what | bytes | who needs it |
# |---|---|---|
# | weight | 2 | forward and backward |
# | gradient | 2 | the optimizer, once per step |
# | master weight | 4 | the optimizer |
# | first and second moment | 4 + 4 | the optimizer |
#
# These are 16 bytes, and 12 of them are the optimizer's. On p data-parallel ranks the same 16 bytes exist p times. But
# look at the last column. The optimizer's 12 bytes are needed once per step, for an update that all ranks compute alike.
# It would be enough if **one** of them computed it.
#
# Rajbhandari et al. (2019) divide these bytes over the ranks in three stages, and call it ZeRO, for *zero redundancy
# optimizer*:
#
# - **stage 1** divides the optimizer's state: each rank keeps 12/p bytes of it for each parameter;
# - **stage 2** divides the gradients too: a rank keeps those that its part of the optimizer needs;
# - **stage 3** divides the weights too: a rank keeps its part, and borrows the others when a layer needs them.
#
# For example, one billion parameters on 4 ranks take 16 GB on each rank without ZeRO. At stage 1 they take 2 + 2 + 12/4
# = 7 bytes for each parameter, 7 GB.

# %% tags=["figure"]
plot.zero(num_ranks=4)

# %% [markdown]
# **Predict.** The paper's first figure has 7.5 billion parameters on 64 ranks. How many GB does a rank keep without
# ZeRO, and at each of the three stages? What remains at stage 1 and 2 however many ranks there are, in bytes for each
# parameter?

# %% tags=["predict"]
without_gb = 7.5 * 16
stage_1_gb = 7.5 * (4 + 12 / 64)
stage_2_gb = 7.5 * (2 + 14 / 64)
stage_3_gb = 7.5 * (16 / 64)

# %% tags=["nbval-check-output"]
mixed = {"weight_bytes": 2, "gradient_bytes": 2, "optimizer_bytes": 12}
paper = []
for stage in range(4):
    kept = state_bytes(7_500_000_000, stage, ranks=64, **mixed)
    paper.append(kept.total / 1e9)
compare("without ZeRO", without_gb, paper[0], within=1.01, unit="GB", found="computed")
compare("stage 1", stage_1_gb, paper[1], within=1.01, unit="GB", found="computed")
compare("stage 2", stage_2_gb, paper[2], within=1.01, unit="GB", found="computed")
compare("stage 3", stage_3_gb, paper[3], within=1.01, unit="GB", found="computed")

# %% [markdown]
# 120 GB fit on no GPU of that time. 31.4 GB fit on one of 32 GB, and stage 3 needs 1.9 GB. Stages 1 and 2 end at 4 and 2
# bytes for each parameter. They do not help any more once a model's weights alone are too large for a device.
#
# In this lesson everything is float32: 4 bytes for the weight, 4 for its gradient and 8 for the moments. There are no
# master weights then, because the weights have 32 bits already.
#
# **Takeaway: three quarters of what a rank keeps for a parameter belong to the optimizer. Stage 1 of ZeRO divides these,
# stage 2 the gradients as well, stage 3 everything.**

# %% [markdown]
# ## 2. Stage 1: each rank updates its part
#
# First we have to say what a rank's part is. We cut each weight along its first dim, its rows. With R rows and p ranks,
# each rank gets R/p rows, rounded up, until none are left; so the last rank may get fewer rows, or none. This is how
# `torch.chunk` cuts. For example, 7 rows on 4 ranks are 2, 2, 2 and 1, and 5 rows are 2, 2, 1 and 0.

# %% [markdown] tags=["exercise"]
# ### Exercise 13.1 · My rows
#
# Write a function that returns the rows of one rank as a **view**: it must share the memory of the weight. One or two
# lines.

# %% tags=["exercise"]
def own_rows(weight, group):
    """The rows of `weight` that this rank of the group updates: a view, perhaps of 0 rows."""
    ### BEGIN SOLUTION
    p, rank = dist.get_world_size(group), dist.get_rank(group)
    each = -(-len(weight) // p)
    return weight[rank * each : (rank + 1) * each]
    ### END SOLUTION

# %% tags=["check"]
check("13.1", lambda: l13.own_rows(own_rows, ranks))

# %% [markdown]
# AdamW treats each number by itself: the new value of a weight depends on that weight, its gradient and its own two
# moments. So the update of some rows is some rows of the update, and a rank can hand its rows to an ordinary AdamW as if
# they were a weight of their own. An optimizer such as Muon, which looks at a whole matrix, could not be divided in this
# way.
#
# A step then has three parts:
#
# 1. each rank takes its rows of the averaged gradients;
# 2. an ordinary optimizer updates its rows, which also changes the whole weight, since they share their memory;
# 3. each rank sends its rows to all others, and gets theirs.

# %% [markdown] tags=["exercise"]
# ### Exercise 13.2 · An optimizer of which each rank keeps a part
#
# Write the class. The gradients in `param.grad` are averaged already. `make` makes an ordinary optimizer of a list of
# tensors, as in `make = lambda params: torch.optim.AdamW(params, lr=0.01)`; call it once. For the third part, let each
# rank broadcast its rows: `dist.broadcast(tensor, group_src=i, group=group)` sends the tensor of rank i of the group and
# overwrites that of the others. About 15 lines.

# %% tags=["exercise"]
class ShardedOptimizer:
    """Updates `params`, which all ranks of the group hold; each rank keeps the state of its rows."""

    def __init__(self, params, make, group):
        ### BEGIN SOLUTION
        self.params = list(params)
        self.group = group
        self.rows = []
        for param in self.params:
            self.rows.append(nn.Parameter(own_rows(param.detach(), group)))
        self.inner = make(self.rows)
        ### END SOLUTION

    def step(self):
        """Update all weights, on all ranks."""
        ### BEGIN SOLUTION
        for param, rows in zip(self.params, self.rows):
            rows.grad = own_rows(param.grad, self.group)
        self.inner.step()
        p = dist.get_world_size(self.group)
        with torch.no_grad():
            for param in self.params:
                for rank, part in enumerate(parts_of(param, p)):
                    dist.broadcast(part, group_src=rank, group=self.group)
        ### END SOLUTION

    def zero_grad(self):
        """Forget the gradients of the whole weights."""
        ### BEGIN SOLUTION
        for param in self.params:
            param.grad = None
        ### END SOLUTION

# %% tags=["check"]
check("13.2", lambda: l13.sharded_optimizer(ShardedOptimizer, ranks))

# %% [markdown]
# Here is labcode's. It packs the rows of all weights into one message and sends them with a single all-gather, for the
# reason that you found in lesson 05: one large message is faster than a hundred small ones. Since an all-gather wants
# parts of one size, the message is filled up with zeros.

# %%
show_source(zero.optimizer.ShardedOptimizer.step)
show_source(zero.optimizer.gather_weights)

# %% [markdown]
# What does stage 1 cost? With DDP a rank sends 2 (p-1)/p N numbers for the all-reduce of the gradients (lesson 01). Now
# the all-gather of the weights comes on top, (p-1)/p N numbers.
#
# **Predict.** Two ranks, a model with 3 layers of 8 × 8 weights and 8 biases, float32. How many bytes have the tensors
# of the all-reduce and of the all-gather? And how many times as much as with DDP does a rank send in a step?

# %% [markdown]
# ## 3. Stage 2: only my part of the gradients
#
# Half of that all-reduce was for nothing. A rank needs the averaged gradient of its own rows and of no others. In lesson
# 01 you wrote an all-reduce as two halves: a reduce-scatter, after which each rank holds the sum of its own part, and an
# all-gather. So take the first half alone. The second half moves behind the optimizer, where it carries new weights in
# place of gradients:
#
# | | after backward | after the optimizer | numbers that a rank sends |
# |---|---|---|---|
# | DDP | all-reduce of gradients | | 2 (p-1)/p N |
# | stage 1, as above | all-reduce of gradients | all-gather of weights | 3 (p-1)/p N |
# | stages 1 and 2 | reduce-scatter of gradients | all-gather of weights | 2 (p-1)/p N |
#
# So the memory of the optimizer's state shrinks to 1/p, and **nothing** more is sent than with DDP. This is why stage 1
# is the default in Megatron-LM (its *distributed optimizer*).
#
# Stage 2 goes one step further. Once a bucket of gradients has been sent, the rank keeps the averages of its own rows
# and frees the rest.

# %% [markdown] tags=["exercise"]
# ### Exercise 13.3 · The average of my rows
#
# Write a function that is called after backward. It leaves in `rows[i].grad` the average over the group of this rank's
# rows of `params[i].grad`, and in `params[i].grad` nothing. Do it with **one** reduce-scatter for all weights:
# `dist.reduce_scatter(own, parts, group=group)` takes a list of p tensors of one size, of which number j goes to rank j,
# and writes into `own` the sum of what it receives. Rows that are missing to the common size are zeros. About 15 lines.

# %% tags=["exercise"]
def average_own_rows(params, rows, group):
    """The average of this rank's rows, in `rows[i].grad`; the whole gradients are freed."""
    ### BEGIN SOLUTION
    p = dist.get_world_size(group)
    longest = sum(parts_of(param, p)[0].numel() for param in params)
    parts = torch.zeros(p, longest)
    for rank in range(p):
        pieces = [parts_of(param.grad, p)[rank].flatten() for param in params]
        flat = torch.cat(pieces)
        parts[rank, : len(flat)] = flat
    own = torch.empty(longest)
    dist.reduce_scatter(own, list(parts), group=group)
    own /= p
    first = 0
    for param, row in zip(params, rows):
        row.grad = own[first : first + row.numel()].view_as(row)
        first += row.numel()
        param.grad = None
    ### END SOLUTION

# %% tags=["check"]
check("13.3", lambda: l13.average_own_rows(average_own_rows, ranks))

# %% [markdown]
# **Takeaway: an all-reduce is a reduce-scatter and an all-gather. ZeRO puts the optimizer between the two. Stages 1 and 2
# save memory and send nothing more.**

# %% [markdown]
# ## 4. Stage 3: borrow the weights
#
# A layer needs its whole weight twice: when its forward runs, and when its backward runs. In between, and all the rest of
# the step, it needs nothing. So a rank keeps its rows, and around each use it does this:
#
#     forward     all-gather the weight -> compute -> free it
#     backward    all-gather the weight again -> compute -> free it -> reduce-scatter the gradient
#
# With two all-gathers and one reduce-scatter a rank sends 3 (p-1)/p N numbers in a step, half as much again as with DDP.
# That is the price of stage 3.
#
# How do you free a weight that autograd has saved for backward? The trick is that of PyTorch's FSDP. A tensor is a
# header (shape, dtype) with a pointer to a **storage**, the memory itself. What autograd has saved points to the same
# storage. `weight.untyped_storage().resize_(0)` gives the memory back and leaves all headers as they are. Before
# backward you resize the storage to its old size and fill it, and everything that points to it is right again.

# %% [markdown] tags=["exercise"]
# ### Exercise 13.4 · A linear layer that borrows its weight
#
# ...two steps: (a) `gather` and `free`, (b) the hooks: a pre-hook of forward, a hook of the output's gradient, a hook of
# the weight's gradient. About 25 lines.

# %% [markdown]
# ## 5. Units, prefetch and what to keep
#
# - one unit per layer: too small, too many messages; the whole model: the memory is whole again
# - predict: the most that is whole at once with units of one layer, with prefetch, with the whole model as one unit
# - measure with `held_bytes` and the storages of the units
# - reshard after forward or not: 3 against 2 all-gathers... (time against memory)
# - FSDP2 beside ours: same numbers, same counts, the figure of both in time (benchmarks/zero.py)
#
# ## 6. Hybrid sharding, and when tensor parallelism is better
#
# - hybrid: shards inside a node, copies across: what crosses the slow link is N/s instead of N
# - tp sends activations (b s h), ZeRO-3 weights (12 h^2 a layer): which is less? derive the batch at which they are equal
# - with little batch per rank (strong scaling) tp, else ZeRO; both together as in Llama 3
#
# ### Exercise 13.5 (open) · A layout from a form: stage, units, copies for a model and a cluster, with the costs shown
#
# ## Quiz, recap, GPUs and SLURM
