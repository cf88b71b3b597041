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
# # 24 · Expert parallelism
#
# A mixture of experts has many MLPs in each layer, and a token uses a few of them. The experts hold nearly all of its
# parameters, so they are what does not fit on a device. **Expert parallelism** (ep) gives each rank some of the
# experts. The experts stay where they are, and the tokens travel: to the rank that keeps their expert, and back. How
# many go where is known only when the router has chosen. You write this journey, its way back through autograd, and the
# sums of the gradients, which no longer all run over the same ranks. That last part is where PyTorch, Megatron-LM and
# torchtitan have all had wrong numbers in 2025 or 2026, while the loss looked right.
#
# ## Goals
#
# - dispatch rows to experts on other ranks with an uneven all-to-all, and write its backward;
# - check the layer against one process, also where an expert gets nothing and where one gets everything;
# - say over which group each gradient is summed, by what it is divided, and what a norm for clipping counts;
# - say why the router stands before the all-gather of tp, and read where each tensor of a model lives;
# - predict the bytes of a layer, and say when it is cheaper to move weights than tokens.
#
# **Time**: 150 minutes. Good places for a break are after sections 2 and 4.
#
# **Needs**: lesson 01 (sections 1, 2), lesson 04 (section 1), lesson 09 (sections 1, 2) and lesson 23 (sections 2, 5).
# For section 3 also lesson 08 (section 2); for section 4 also lesson 10 (section 3) and lesson 13 (section 1); for
# section 5 also lesson 13 (section 1).

# %%
import torch
import torch.distributed as dist
import torch.nn.functional as F

from course.lab import Ranks, check, compare, plot
from labcode.comm.counting import counted
from labcode.comm.grid import Grid
from labcode.topology import GridShape

ranks = Ranks(4)

# %% [markdown]
# ## 1. Rows travel (core, 22 min)
#
# With 8 experts and ep = 4, rank 0 keeps the experts 0 and 1, rank 1 keeps 2 and 3, and so on: each rank keeps
# **neighbours**. Every rank has tokens of its own, as in data parallelism. In lesson 23 a **row** was one token on its
# way to one of its k experts, so T tokens make T k rows. Here is the way of the rows of two ranks, with three tokens
# each and k = 2. The rows are written as token and expert: "b 3" is token b for expert 3. Their colour and line tell
# whose token it is.

# %% tags=["figure"]
plot.row_exchange(
    [
        {"a": (2, 0), "b": (0, 3), "c": (1, 0)},
        {"d": (2, 3), "e": (2, 3), "f": (2, 1)},
    ],
    experts_per_rank=2,
    caption="24.rows",
)

# %% [markdown]
# 1. **Sort by expert**, as in lesson 23. Because a rank keeps neighbours, the rows are then sorted by **rank** as well:
#    what goes to one rank lies in one piece.
# 2. **All-to-all**: each rank sends each other rank its piece. The pieces have different lengths, so this is an
#    **uneven** all-to-all. In PyTorch it is `dist.all_to_all_single(output, input, output_split_sizes,
#    input_split_sizes)`. The sizes are lists with one number of rows for each rank of the group.
# 3. **Sort by expert again**. What arrives is sorted by sender, and within each piece by expert. But an expert wants
#    all of its rows as one matrix.
#
# A rank knows what it sends. What it receives is decided by the others. So a small, even all-to-all comes first: a
# rank tells each other rank how many rows to expect for **each of that rank's experts**. In all it tells E numbers.
#
# Take four ranks, eight experts, and these counts of rows for each expert:
#
# | | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |
# |---|---|---|---|---|---|---|---|---|
# | rank 0 sends | 3 | 1 | 0 | 2 | 1 | 1 | 0 | 4 |
# | rank 1 sends | 1 | 2 | 2 | 1 | 0 | 3 | 2 | 1 |
# | rank 2 sends | 0 | 4 | 1 | 1 | 2 | 2 | 1 | 1 |
# | rank 3 sends | 2 | 2 | 3 | 0 | 1 | 0 | 3 | 1 |
#
# **Predict.** How many rows does rank 0 send to each of the four ranks? And how many does rank 1 receive from each?

# %% tags=["predict"]
sent_by_rank_0 = [4, 2, 2, 4]
received_by_rank_1 = [2, 3, 2, 3]

# %% tags=["nbval-check-output"]
COUNTS = torch.tensor(
    [
        [3, 1, 0, 2, 1, 1, 0, 4],
        [1, 2, 2, 1, 0, 3, 2, 1],
        [0, 4, 1, 1, 2, 2, 1, 1],
        [2, 2, 3, 0, 1, 0, 3, 1],
    ]
)

def told_and_heard(rank):
    """Rows that this rank sends to each rank, and that it is told to expect."""
    own = COUNTS[rank].view(4, 2)  # by rank, and by expert of that rank
    theirs = torch.empty_like(own)
    dist.all_to_all_single(theirs, own)
    return own.sum(1).tolist(), theirs.sum(1).tolist()

told = ranks.run(told_and_heard)
compare("rank 0 sends", sent_by_rank_0, told[0][0])
compare("rank 1 receives", received_by_rank_1, told[1][1])

# %% [markdown] tags=["exercise"]
# ### Exercise 24.1 · From counts to splits
#
# `counts` is a tensor [E] with this rank's rows for each expert. Return how many rows go to each of `num_ranks` ranks,
# as a list of whole numbers: `all_to_all_single` takes no tensors here. `num_ranks` divides E. One line.

# %% tags=["exercise"]
def send_splits(counts, num_ranks):
    """[E] -> rows for each rank, a list."""
    ### BEGIN SOLUTION
    return counts.view(num_ranks, -1).sum(1).tolist()
    ### END SOLUTION

# %% tags=["check"]
check("24.1", send_splits)

# %% [markdown]
# And backward? `dist.all_to_all_single` is no operation of autograd: a row that has travelled has forgotten where it
# came from. But its gradient has to get to where the row was made. Say rank 0 sent 2 rows to rank 1. In backward, rank
# 1 has the gradients of these 2 rows, and sends them back. So backward is an all-to-all again, in which everyone
# **sends** as many rows as it received in forward, and **receives** as many as it sent.

# %% [markdown] tags=["exercise"]
# ### Exercise 24.2 · The uneven all-to-all
#
# Write it as an autograd Function. `rows` [R, H] holds the rows for rank 0 of the group first. `sent` and `received`
# are lists with a number for each rank of the group. Return the rows that arrive, [R', H]; R' can be another number
# than R, and it can be 0. `new_empty` makes a tensor of the same dtype on the same device. What gloo and NCCL send has
# to be contiguous in memory, and a gradient need not be. backward returns four things, the gradient of `rows` and None
# for the others. The check simulates groups of four, six and three ranks, and then asks the real ones.

# %% tags=["exercise"]
class MyExchange(torch.autograd.Function):
    """Rows to other ranks; backward their gradients take the way back."""

    @staticmethod
    def forward(ctx, rows, sent, received, group):
        ### BEGIN SOLUTION
        ctx.sent = sent
        ctx.received = received
        ctx.group = group
        out = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
        return out
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad):
        ### BEGIN SOLUTION
        out = grad.new_empty(sum(ctx.sent), grad.shape[1])
        dist.all_to_all_single(
            out, grad.contiguous(), ctx.sent, ctx.received, group=ctx.group
        )
        return out, None, None, None
        ### END SOLUTION

# %% tags=["check"]
check("24.2", MyExchange, ranks)

# %% [markdown]
# labcode has it as `exchange_rows(rows, sent, received, group)`, which the next section uses.
#
# **Takeaway: sorted by expert, the rows for a rank lie in one piece. The counts travel first, the rows second, and
# backward exchanges what is sent with what is received.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* In 24.1 some take `counts[rank::num_ranks]`, experts that are dealt out like cards; the rows of
# a rank would then not lie in one piece. In 24.2 the first try is often the same splits in backward: it passes
# where all splits are equal, which is why the check has none that are. Ask: why does the all-to-all of the counts need
# no backward? (Counts are whole numbers; nothing that is trained follows from them smoothly.)

# %% [markdown]
# ## 2. The layer (core, 36 min)
#
# Now the layer around the journey. It has a router [H, E], and for each expert two matrices with a gelu between them.
# `route` is the first variant of lesson 23: softmax first and no division by the sum, so that the router learns with
# k = 1 too. Its matrix is the transpose of lesson 23's, and there is no balance loss. `layer_alone` is the whole
# layer where all experts are at hand; it lets every expert work on all tokens, and multiplies by weights that are
# mostly zero. That is slow, and easy to trust. Later cells import these functions as `by_hand`, together with our
# solutions of the exercises, so that the lesson runs without yours as well.

# %% tags=["by-hand"]
def route(x, router, k):
    """Weights and numbers of the k experts of each token: [T, k] both."""
    return torch.softmax(x @ router, -1).topk(k, -1)

def apply_experts(rows, counts, up, down):
    """Each expert on its rows, which lie one after the other."""
    done = []
    for number, own in enumerate(rows.split(counts.tolist())):
        done.append(F.gelu(own @ up[number]) @ down[number])
    return torch.cat(done)

def sum_of_all(x, weights, chosen, up, down):
    """Every expert on all tokens, most of them with the weight zero."""
    y = torch.zeros_like(x)
    for number in range(len(up)):
        weight = (weights * (chosen == number)).sum(-1, keepdim=True)
        y = y + weight * (F.gelu(x @ up[number]) @ down[number])
    return y

def layer_alone(x, router, up, down, k):
    """[T, H] -> [T, H], with all experts on this rank."""
    weights, chosen = route(x, router, k)
    return sum_of_all(x, weights, chosen, up, down)

# %% [markdown]
# What happens to an expert that no token has chosen? `rows.split` gives it a matrix of zero rows, [0, H]. PyTorch
# multiplies that as any other, and gets zero rows.
#
# **Predict.** Let one expert get everything: four ranks with 24 tokens each, k = 1, and all choose expert 3. How many
# rows arrive at the ranks 0, 1, 2 and 3? And on rank 0, after backward, is the gradient of `up` "None", "zeros" or
# "other"?

# %% tags=["predict"]
rows_of_ranks = [0, 96, 0, 0]
gradient_of_idle = "zeros"

# %% tags=["nbval-check-output"]
from course.labs import l24_by_hand as by_hand
from course.labs import l24_experts as lab

ALL_FIRST = "all choose expert 3 first"
matrix = torch.tensor(ranks.run(lab.rows_sent, ALL_FIRST, 1))  # from rank i to rank j
compare("rows that arrive", rows_of_ranks, matrix.sum(0).tolist())
gradients = ranks.run(lab.step, by_hand.expert_layer, 4, ALL_FIRST, 1)
kinds = [lab.kind_of(each["up"]) for each in gradients]
compare("gradient on rank 0", gradient_of_idle, kinds[0], options=lab.KINDS)
print("on all ranks:", kinds)

# %% [markdown]
# Zero rows give zeros, and this matters. A rank that says "I have nothing to do" and leaves the experts out has a
# gradient that is `None`. A rank that leaves out the all-to-all lets the others wait for ever. An expert without rows
# takes part in every collective, with zero rows.

# %% [markdown] tags=["exercise"]
# ### Exercise 24.3 · The layer
#
# The group has p ranks. `x` [T, H] holds this rank's tokens; `router` is whole on every rank; `up` [E/p, H, F] and
# `down` [E/p, F, H] are this rank's experts. `exchange(rows, sent, received, group)` does what your `MyExchange` does.
# Rows travel by `exchange` alone, twice in forward. What is missing is the way there and back:
#
# 1. sort the rows by expert. Row r is choice number `order[r]` of the flattened `chosen`, so it belongs to token
#    `order[r] // k`;
# 2. send the counts, and get `theirs` [p, E/p]: rows by sender and by expert of this rank;
# 3. send the rows, sort what arrives by expert, and let `apply_experts` do its work;
# 4. undo the sorting, send the results back, multiply each by its weight, and add them up for each token.
#
# The permutation that undoes `order` is `order.argsort()`. A new tensor with rows added is
# `torch.zeros_like(x).index_add(0, numbers, rows)`. About 14 lines.

# %% tags=["by-hand", "exercise"]
from labcode.parallel.experts import exchange_rows


def expert_layer(x, router, up, down, k, group, exchange=exchange_rows):
    """[T, H] -> [T, H]: this rank's tokens, the experts of all ranks of the group."""
    num_experts = router.shape[1]
    p = group.size()
    weights, chosen = route(x, router, k)
    ### BEGIN SOLUTION
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=num_experts).view(p, -1)
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts, group=group)
    sent = counts.sum(1).tolist()
    received = theirs.sum(1).tolist()
    arrived = exchange(x[order // k], sent, received, group)
    number = torch.arange(theirs.shape[1]).repeat(p)
    by_expert = number.repeat_interleave(theirs.flatten()).argsort(stable=True)
    done = apply_experts(arrived[by_expert], theirs.sum(0), up, down)
    done = done[by_expert.argsort()]
    back = exchange(done, received, sent, group)
    weighted = weights.flatten()[order, None] * back
    return torch.zeros_like(x).index_add(0, order // k, weighted)
    ### END SOLUTION

# %% tags=["check"]
check("24.3", expert_layer, ranks)

# %% [markdown]
# Is it the layer of one process? `lab.step` runs it on four ranks, each with its tokens, its experts and a loss of its
# own. `lab.joined` makes one step of that: the mean loss, and the whole gradients. (How gradients are joined is the
# subject of the next section.) `lab.alone` runs `layer_alone` on all tokens at once.

# %% tags=["nbval-check-output"]
for load in lab.LOADS:
    truth = lab.alone(by_hand.layer_alone, load)
    found = lab.joined(ranks.run(lab.step, by_hand.expert_layer, 4, load))
    errors = {name: lab.relative_error(found[name], truth[name]) for name in truth}
    right = [name for name, error in errors.items() if error < 1e-12]
    print(f"{load:26} right to 1e-12: {', '.join(right)}")

# %% [markdown]
# It is the same layer, wherever the experts are. Only sums are ordered differently.
#
# **Takeaway: there, by expert, and back: three permutations and three all-to-alls, one of counts and two of rows. An
# expert without rows still takes part, and gets a gradient of zeros.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* To be expected in 24.3: the second sorting is forgotten, which goes unnoticed as long as
# each rank keeps a single expert; `order` is undone by indexing with `order` once more; `theirs` is summed over the
# wrong dim. Ask: what would be different with a capacity? (Only `order` is shorter; lesson 23, section 4.)

# %% [markdown]
# ## 3. Which sums over which group (core, 30 min)
#
# Let us have replicas: the four ranks of dp form two groups of ep, ep = 2, each with all experts. So each expert is
# there twice. **edp** is the group of the ranks that keep the same experts: ep · edp = dp.

# %% tags=["nbval-check-output"]
from course.labs import l24_by_hand as by_hand
from course.labs import l24_experts as lab

SHAPE = GridShape(dp=4, ep=2)
for axis in ("dp", "ep", "edp"):
    print(f"{axis:4}{SHAPE.groups(axis)}")

# %% [markdown]
# The loss of the step is the mean of the losses of the four ranks, L = (L₀ + L₁ + L₂ + L₃) / 4. What does backward
# leave on rank 0, and what is missing?
#
# - **Router, attention, norms**: each rank has the whole weight, and the gradient of **its own** loss. It takes the sum
#   over dp, and a division by 4. That is plain data parallelism.
# - **Experts**: the rows of ranks 0 **and** 1 were here, and in backward the gradients of both losses came back to
#   them. Rank 0 has the gradient of L₀ + L₁ already. The gradient of L₂ + L₃ lies on rank 2. So it takes the sum over
#   **edp**, and a division by 4 all the same, because it is a mean of four losses.
#
# Tools that average divide by the size of the group that they are given. DDP, FSDP and an all-reduce with `AVG` do so.
#
# **Predict.** Somebody gives them edp for the experts, and dp for everything else. How many times too long is the
# gradient of the experts?

# %% tags=["predict"]
times_too_long = 2

# %% tags=["nbval-check-output"]
def averaged_over_edp():
    """This rank's gradient of `up`, averaged over the replicas of its experts."""
    grid = Grid.create(SHAPE)
    grad = lab.step(by_hand.expert_layer, grid.size("ep"))["up"]
    dist.all_reduce(grad, group=grid.group("edp"))
    return grad / grid.size("edp")

found = ranks.run(averaged_over_edp)[0]
expected = lab.alone(by_hand.layer_alone)["up"].chunk(2)[0]
times = round((found.norm() / expected.norm()).item(), 9)
compare("times too long", times_too_long, times, within=1)

# %% [markdown]
# That was a bug of torchtitan, reported in August 2025 as PyTorch's issue 160285: "the gradients are doubled with
# EP=2", while the loss curves are equivalent. FSDP was given the replicas of the experts, and divided by their
# number. torchtitan now sets the divisor by hand (pull request 1551). Then FSDP ignored that divisor where an expert
# has no replica (PyTorch, pull request 167178, November 2025). Why did nobody see it in the loss? AdamW divides a
# gradient by its own usual size, so a constant factor drops out. Not so where gradients are **compared** with each
# other: in a norm.
#
# For clipping, all ranks need the norm of the **whole** gradient, $\sqrt{\sum g^2}$ over all numbers of the model, each
# counted once. After the sums, the router's gradient is the same on all ranks. The experts' gradients are different
# over ep, and the same over edp.
#
# **Predict.** In our layer, as in large models, nearly the whole norm is that of the experts. A rank takes the norm of
# what it holds, and asks nobody. What fraction of the true norm is that, if the two ranks of ep have about equally long
# gradients?

# %% tags=["predict"]
fraction_of_norm = 0.5**0.5

# %%
def fraction_on_a_rank():
    """The norm of what this rank holds after the sums, divided by the whole norm."""
    grid = Grid.create(SHAPE)
    dense, experts = lab.with_gradients(by_hand.expert_layer, grid.size("ep"))
    groups = [grid.group(axis) for axis in ("dp", "ep", "edp")]
    whole = by_hand.finish_gradients(dense, experts, *groups)
    own = [param.grad.norm() for param in (*dense, *experts)]
    return (torch.stack(own).norm() / whole).item()

fractions = ranks.run(fraction_on_a_rank)
compare("fraction", fraction_of_norm, fractions[0], within=1.1)
print("on the four ranks:", ", ".join(f"{fraction:.3f}" for fraction in fractions))

# %% [markdown]
# It is too small, so that clipping acts later than it should. And it is not even the same on neighbours: both clip
# the router, by different factors, and their copies of it drift apart. In Megatron-LM the norm left out some experts
# where ep and tp were both larger than 1, until July 2026: it took them for copies over tp (pull request 5916). A sum
# over all of dp would be wrong, too: it would count each expert edp times and the router dp times.

# %% [markdown] tags=["exercise"]
# ### Exercise 24.4 · Groups and the norm
#
# After backward, each parameter of the two lists has the gradient that backward left in it. `dense` are those that
# every rank of dp has, such as router, attention and norms; `experts` are this rank's experts. `dp`, `ep` and `edp`
# are process groups. Make each gradient that of the mean loss over dp, in place, and return the norm of all of them,
# as if one process had them: a tensor with one number, the same on all ranks of dp.
#
# A rank need not send more than each gradient once, and one number for the norm; the check does not count it. It uses
# other sizes than four and two, also one where each expert is there only once. It also runs two such sets of ranks
# side by side, as two stages of a pipeline: each set has gradients and a norm of its own.

# %% tags=["by-hand", "exercise"]
def finish_gradients(dense, experts, dp, ep, edp):
    """Gradients of the mean loss in place; returns the norm of all of them."""
    ### BEGIN SOLUTION
    for param in dense:
        dist.all_reduce(param.grad, group=dp)
        param.grad /= dp.size()
    for param in experts:
        dist.all_reduce(param.grad, group=edp)
        param.grad /= dp.size()
    squares = torch.zeros((), dtype=torch.float64)
    for param in experts:
        squares += param.grad.square().sum()
    dist.all_reduce(squares, group=ep)
    for param in dense:
        squares += param.grad.square().sum()
    return squares.sqrt()
    ### END SOLUTION

# %% tags=["check"]
check("24.4", finish_gradients, ranks)

# %% [markdown]
# What do these sums send? The router has 16 · 8 numbers, and each of the 8 experts 2 · 16 · 32, in float64.
#
# **Predict.** How many bytes of gradients does a rank put into all-reduces with ep = 1, and how many with ep = 2?
# (Leave out the 8 bytes of the norm.)

# %% tags=["predict"]
bytes_ep_1 = 8 * (16 * 8 + 8 * 2 * 16 * 32)
bytes_ep_2 = 8 * (16 * 8 + 4 * 2 * 16 * 32)

# %% tags=["nbval-check-output"]
def reduced_bytes(ep):
    """Bytes of all all-reduces of gradients that this rank takes part in."""
    grid = Grid.create(GridShape(dp=4, ep=ep))
    dense, experts = lab.with_gradients(by_hand.expert_layer, ep)
    groups = [grid.group(axis) for axis in ("dp", "ep", "edp")]
    with counted() as calls:
        by_hand.finish_gradients(dense, experts, *groups)
    return sum(call.num_bytes for call in calls if call.num_bytes > 8)

compare("ep = 1", bytes_ep_1, ranks.run(reduced_bytes, 1)[0], unit="B", within=1)
compare("ep = 2", bytes_ep_2, ranks.run(reduced_bytes, 2)[0], unit="B", within=1)

# %% [markdown]
# With ep = 4 the experts would need no sum at all: each is there once, and has seen the tokens of all ranks.
#
# **Takeaway: an expert's gradient is summed over edp, every other over dp, and both are divided by dp. The norm adds
# the squares of experts over ep and counts everything once.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Let the room write down on the board which losses have reached rank 2 after backward. In 24.4
# people divide by the group that they sum over, add up the router's squares over ep, or sum the norm over the whole
# job, which the case with two stages shows. Ask: which of these mistakes would show in the loss? (None within the first
# step.)

# %% [markdown]
# ## 4. Experts and tensor parallelism (core, 20 min)
#
# An expert's matrices can also be cut inside, over tp, as those of an MLP in lesson 09. Which of the two comes first?
#
# - **Bytes.** Let each of p ranks hold T tokens between the layers, as under sequence parallelism. tp gathers the
#   tokens of all, so a rank receives T H (p-1) numbers, and as many leave it when the results are summed. ep sends T k
#   H (p-1)/p numbers there and as many back. So ep sends k/p times as much: with p = 8 and k = 2 a quarter.
# - **Shapes.** An expert of DeepSeek-V3 has 2,048 features inside; over tp = 8 that leaves 256 columns, which is little
#   work for a GPU. ep leaves each matrix whole, and brings each expert the rows of p ranks.
#
# So ep comes first, and tp is for experts that do not fit otherwise. Where tp cuts the attention anyway, the experts
# can still be cut by ep alone; Megatron-LM's `--expert-tensor-parallel-size 1` says that.
#
# If tp does cut the experts, one thing goes wrong easily. Under sequence parallelism a rank of tp holds a part of the
# tokens between the layers. In front of the experts stands an all-gather: behind it each rank has all tokens, and
# computes a partial sum of each output. Where does the router belong? Here are both places.

# %%
from course.labs.l24_by_hand import route, sum_of_all
from labcode.comm.collectives import all_gather, copy_to, reduce_scatter


def router_before(x, router, up, down, k, tp):
    """[T/tp, H] -> [T/tp, H]; `up` and `down` hold some features of all experts."""
    weights, chosen = route(x, router, k)
    x = all_gather(x, tp, 0)
    weights = all_gather(weights, tp, 0)
    chosen = all_gather(chosen, tp, 0)
    return reduce_scatter(sum_of_all(x, weights, chosen, up, down), tp, 0)

def router_behind(x, router, up, down, k, tp):
    """The same output."""
    x = all_gather(x, tp, 0)
    weights, chosen = route(x, router, k)
    weights = copy_to(weights, tp)
    return reduce_scatter(sum_of_all(x, weights, chosen, up, down), tp, 0)

# %% [markdown]
# The weights are multiplied with partial sums, so their gradient is a partial sum as well, and somebody has to add it
# up over tp. In the first function the all-gather of the weights does it, whose backward is a reduce-scatter: a rank
# gets the whole gradient for **its** tokens. In the second one it is f of lesson 09, `copy_to`, whose backward is an
# all-reduce: each rank gets the whole gradient for **all** tokens. After backward the router's gradient is summed over
# tp in both cases, together with those of the norms, which under sequence parallelism see a part of the tokens each.
#
# **Predict.** With tp = 2, by what factor is the router's gradient off (1 is right), if the router stands before the
# all-gather, and if it stands behind it? And what flows back into `x`, to the layers below: is it right in "both", in
# "before" alone, in "behind" alone, or in "none" of them?

# %% tags=["predict"]
times_before = 1
times_behind = 2
x_is_right_in = "before"

# %% tags=["nbval-check-output"]
from course.labs import l24_by_hand as by_hand
from course.labs import l24_experts as lab

truth = lab.alone(by_hand.layer_alone)
before = ranks.run(lab.errors_on_tp, router_before, truth)[0]
behind = ranks.run(lab.errors_on_tp, router_behind, truth)[0]
compare("before", times_before, before["router"], within=1)
compare("behind", times_behind, behind["router"], within=1)
PLACES = {"before": before, "behind": behind}
right = [name for name, found in PLACES.items() if found["x is off"] < 1e-12]
answer = {0: "none", 2: "both"}.get(len(right), "".join(right))
compare("x is right in", x_is_right_in, answer, options=("both", *PLACES, "none"))
print(f"behind, the gradient of x is off by {behind['x is off']:.2f} of its norm")

# %% [markdown]
# Behind, the gradient of the scores goes through `copy_to` and then through the all-gather of `x`, and **both** add up
# over tp. So the part of x's gradient that comes from the router is counted twice, in this layer and in each one below
# it. To take the router's weight out of the sum over tp, which looks like a cure, mends its own gradient and not that
# of x. To leave out `copy_to` mends both: then the all-gather of x and the sum over tp add once each.
#
# So each path needs one sum over tp, and no second one, and with plain collectives nothing keeps track of which path
# has had it. torchtitan had router gradients that nobody summed in February 2026 (issue 2387: "I can't think of a
# worse class of bugs for MoEs"). Until August, with tp and without ep, a sum over tp was also missing from the
# gradients of everything below the experts (pull request 4054). The loss of the first step is right in each of these
# cases, since only gradients are wrong.
#
# labcode puts the router before the all-gather. Where does each tensor live then, and over which axes is its gradient
# summed? labcode keeps a `ParamSharding` for each weight, which says along which dim which axis cuts it: "Shard(0) over
# ep" means that dim 0 is divided over the ranks of ep. The table asks it, for a GPT on four ranks.

# %% tags=["nbval-check-output"]
from course.labs import l24_experts as lab

for name in lab.CONFIGURATIONS:
    print(name)
    for weight, (place, axes) in ranks.run(lab.placements, name)[0].items():
        short = weight.removeprefix("blocks.0.").removesuffix(".weight")
        print(f"  {short:18}{place:38}summed over {axes}")

# %% [markdown]
# Dim 0 of `up` and `down` is the number of the expert. Under ZeRO-3 dim 0 is divided once more: the experts of a rank
# over edp, every other weight over dp.
#
# **Takeaway: ep cuts first, tp second. The router looks at a rank's own tokens, and its weights pass the all-gather of
# tp with the tokens: each path back is summed over tp once.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Draw the all-gather as a line, and ask of each tensor on which side it is made and on which side
# it is used. A question for the room: qkv has no sum over tp, although its ranks see the same tokens; why? (They hold
# different columns; only replicated weights have copies that must agree.)

# %% [markdown]
# ## 5. What it costs (core, 22 min)
#
# A rank has T k rows of H numbers with b bytes each. Assume that the router spreads them evenly over all experts. Rows
# for the rank's own experts stay. All other rows travel to their experts and back, and in backward
# their gradients do so as well.
#
# **Predict.** For our layer with T = 24, k = 2, H = 16, float64 and ep = 4: how many all-to-alls does a rank start in
# forward and backward, with that of the counts? And how many bytes leave it in all, without the counts?

# %% tags=["predict"]
number_of_all_to_alls = 5
bytes_that_leave = 4 * 24 * 2 * 16 * 8 * 3 / 4

# %% tags=["nbval-check-output"]
from course.labs import l24_by_hand as by_hand
from course.labs import l24_experts as lab


def calls_of_a_step():
    """How many all-to-alls this rank starts."""
    with counted() as calls:
        lab.step(by_hand.expert_layer)
    return [call.kind for call in calls].count("all_to_all")

matrix = torch.tensor(ranks.run(lab.rows_sent))  # rows from rank i to rank j
leaving = matrix.sum() - matrix.trace()  # of all ranks, in one all-to-all
bytes_of_a_rank = 4 * leaving.item() / 4 * 16 * 8  # four all-to-alls; a quarter of all
counts = ranks.run(calls_of_a_step)
compare("all-to-alls", number_of_all_to_alls, counts[0], within=1, found="counted")
compare("bytes", bytes_that_leave, bytes_of_a_rank, unit="B", within=1.1)

# %% [markdown]
# One all-to-all sends T k H b (ep-1)/ep bytes from each rank. More ranks do not make that smaller, and while the rows
# travel the experts have nothing to do. So the link matters. Let a node have two of our four ranks.
#
# **Predict.** Which fraction of the rows goes to the **other** node?

# %% tags=["predict"]
fraction_across = 1 / 2

# %% tags=["nbval-check-output"]
node = torch.arange(4) // 2
crosses = node[:, None] != node
across = (matrix[crosses].sum() / matrix.sum()).item()
compare("across", fraction_across, across, within=1.2)
print(matrix.tolist())

# %% [markdown]
# With n nodes it is (n-1)/n. For DeepSeek-V3, which was trained with ep = 64 on 8 nodes, 7/8 of the rows would leave
# their node. How long does that take beside the computation? A row costs an expert 6 H F FLOPs in forward (three
# matrices of H × F). The rates of the device and of its adapter are those of lesson 09, section 4.

# %% tags=["nbval-check-output"]
from labcode.perf.cluster import load_cluster

dgx = load_cluster("dgx-h100")
T = 4096  # tokens of a rank
H = 7168
INSIDE = 2048
K = 8
NODES = 8
rows = T * K
sending_s = 2 * rows * H * 2 * (NODES - 1) / NODES / dgx.between.beta_bytes_per_s
computing_s = rows * 6 * H * INSIDE / dgx.gpu.layer_flops_per_s("bfloat16")
print(f"two all-to-alls {1e3 * sending_s:.1f} ms, experts {1e3 * computing_s:.1f} ms")

# %% [markdown]
# Whatever T is, sending would take four times as long as computing in forward, and twice as long in backward, where
# the experts compute twice as much. DeepSeek-V3 therefore lets a token go to experts on at most 4 nodes, sends it to
# each of them **once** and copies it there over NVLink, sends 8-bit numbers on the way there, and computes another
# micro-batch meanwhile (sections 2.1.2, 3.2 and 3.3 of its report).
#
# ### Imbalance
#
# All ranks wait in the second all-to-all until the one with the most rows is done. So what counts is the largest number
# of rows, not the mean. Let all tokens take expert 3 as their first choice, and let their second choices spread evenly
# over the seven others.
#
# **Predict.** Rank 1 keeps the experts 2 and 3. How many times as many rows as the mean rank does it get?

# %% tags=["predict"]
times_the_mean = (1 + 1 / 7) / 2 * 4

# %% tags=["nbval-check-output"]
def rows_of_each(load):
    """Rows that arrive at each rank."""
    return torch.tensor(ranks.run(lab.rows_sent, load)).sum(0)

arrived = {load: rows_of_each(load) for load in (lab.LOADS[0], lab.LOADS[2])}
worst = {}
for load, rows in arrived.items():
    worst[load] = (rows.max() / rows.double().mean()).item()
compare("times the mean", times_the_mean, worst[lab.LOADS[2]], within=1.05)
for load, rows in arrived.items():
    print(f"{load:26}{rows.tolist()}  the longest {worst[load]:.2f} times the mean")

# %% tags=["figure"]
table = {}
for load, rows in arrived.items():
    table[load] = {f"rank {rank}": number for rank, number in enumerate(rows.tolist())}
mean = {"mean": rows.double().mean().item()}
plot.bars(table, reference=mean, caption="24.arrived")

# %% [markdown]
# The step of the layer takes as long as the slowest rank, and that rank also needs the memory. Even an untrained router
# is not even. The losses and biases of lesson 23 are there for this.
#
# ### Or let the weights travel
#
# There is another way to have experts that do not fit: ZeRO-3 cuts all weights over dp, and gathers them where they
# are used (lesson 13). Then tokens stay. Take experts with three matrices of H × F, as SwiGLU has them. Each layer's
# experts are gathered in forward and once more in backward, and their gradients are reduce-scattered: three times E ·
# 3 H F numbers, times (p-1)/p. ep sends four times T k H numbers, times (p-1)/p. H and (p-1)/p are in both and drop
# out, and so does the size of a number.
#
# **Predict.** For E = 4 experts with F = 32 features inside, and k = 2: with how many tokens on a rank do both send the
# same?

# %% tags=["predict"]
break_even_tokens = 9 * 4 * 32 / (4 * 2)

# %% tags=["nbval-check-output"]
TRIED = (40, 80, 160, 320)

def bytes_sent(way, tokens):
    """Bytes of the tensors that rank 0 has in collectives."""
    return sum(ranks.run(lab.bytes_of, way, tokens)[0].values())

weights_bytes = bytes_sent("weights travel", TRIED[0])
rows_bytes = [bytes_sent("rows travel", tokens) for tokens in TRIED]
per_token = (rows_bytes[3] - rows_bytes[2]) / (TRIED[3] - TRIED[2])
compare("tokens", break_even_tokens, weights_bytes / per_token, within=1.1)
print(f"weights travel: {weights_bytes:,} B, whatever the number of tokens")
for tokens, num_bytes in zip(TRIED, rows_bytes):
    cheaper = "rows" if num_bytes < weights_bytes else "weights"
    print(f"{tokens:4} tokens: rows {num_bytes:7,} B; cheaper are {cheaper}")

# %% [markdown]
# So the number of tokens is 9 E F / (4 k). For Mixtral 8x7B (E = 8, F = 14,336, k = 2) it is 129,024 tokens on each
# rank, and for DeepSeek-V3 (E = 256, F = 2,048, k = 8) 147,456. A micro-batch has a few thousand. In bytes ep wins by
# far; what speaks for ZeRO-3 is that its messages do not depend on the router, and can be sent ahead, while the layer
# before computes.
#
# **Takeaway: four all-to-alls of T k H b (ep-1)/ep bytes in each layer, which nothing hides by itself. The rank with
# the most rows sets the pace. Moving rows is cheaper than moving weights below 9 E F / (4 k) tokens on a rank.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* For rank 1 "four times the mean" is a likely answer; it forgets that k = 2 halves what expert 3
# gets. Ask: what is the break-even for experts with two matrices? (6 E F / (4 k).) And with ZeRO-3 that keeps the
# weights until backward is done? (Two thirds of it: one gather is saved.)

# %% [markdown]
# ## 6. A clinic (core, 10 min)
#
# Three colleagues, A, B and C, have built this layer, each with one mistake. They have ep = 2 and dp = 4, k = 1, and
# their gradients are summed already. The numbers below compare each layer with one process: is the loss right, and by
# what factor is each gradient too long (1 is right)? If the ranks differ, all four are given; "none" is a gradient
# that is `None`, and 0 one that is zero and should be.
#
# | name | what could be wrong |
# |---|---|
# | `"group"` | the gradients of experts are divided by the size of edp, and not by that of dp |
# | `"norm"` | the norm counts the experts of this rank alone |
# | `"detached"` | a version of the layer gathers the router's scores from all ranks, by a collective that autograd does not know |
# | `"order"` | rows come back in another order than they left |
# | `"skipped"` | a rank whose experts get no rows leaves them out of the graph |
# | `"splits"` | backward sends with the splits of forward |

# %% tags=["nbval-check-output"]
from course.labs import l24_by_hand as by_hand
from course.labs import l24_experts as lab

for load in (lab.LOADS[0], lab.LOADS[2]):
    print(load)
    truth = lab.alone(by_hand.layer_alone, load, 1)
    for name in "ABC":
        results = ranks.run(lab.patient, name, by_hand.expert_layer, load)
        chart = lab.chart(results, truth)
        loss = "right" if chart["loss"] < 1e-12 else "wrong"
        told = [f"{key} {lab.told(chart[key])}" for key in ("router", "up", "down")]
        print(f"  {name}: loss {loss}; {'; '.join(told)}")

# %% [markdown] tags=["exercise"]
# ### Exercise 24.5 · What do they have?
#
# Write a dict that gives each of A, B and C one of the names from the table. All three losses are right, so what can
# you rule out at once?

# %% tags=["exercise"]
### BEGIN SOLUTION
diagnoses = {"A": "group", "B": "detached", "C": "skipped"}
### END SOLUTION

# %% tags=["check"]
check("24.5", diagnoses)

# %% [markdown]
# C does not hang here, because `x` wants a gradient, as it does in a layer that stands on others. Where `x` wants none,
# the all-to-alls of such a rank are not in its graph: it is missing in those of backward, and the others wait for ever.
#
# Nothing of this is seen in a loss. What finds it is a comparison of **gradients** with one process, tensor by tensor,
# with a load that is not friendly.
#
# **Takeaway: test an expert layer by its gradients, on more than one group, with an expert that gets nothing and one
# that gets everything.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* "order" and "splits" can be ruled out, the one by the losses, the other because nobody waits for
# ever; "norm" changes no gradient. C is healthy as long as everybody gets rows. Ask what C would do next: its replica
# on rank 3 has `None` as well, so the sum over edp is left out on both; with a load that leaves only one of them idle,
# the other waits.

# %% [markdown]
# ## 7. Plain PyTorch (core, 4 min)
#
# In PyTorch 2.13 the functional collective `all_to_all_single` knows autograd: its backward is registered in
# `torch/distributed/_functional_collectives.py`, and exchanges the splits. `all_to_all_single_autograd` from the same
# file is by now only another name for it. torchtitan uses it. (`torch.distributed.nn.functional.all_to_all_single` does
# the same; it is deprecated.) The plain `dist.all_to_all_single` has no backward. Our layer takes what moves its rows
# as an argument, so we can try both.
#
# **Predict.** With the plain one, which gradients are missing: "router", "experts" or "both"? Follow the weights of the
# rows.

# %% tags=["predict"]
missing = "experts"

# %% tags=["nbval-check-output"]
from torch.distributed._functional_collectives import all_to_all_single_autograd

from course.labs import l24_by_hand as by_hand
from course.labs import l24_experts as lab


def torchs_exchange(rows, sent, received, group):
    """[R, H] -> [R', H]; what arrives comes first in PyTorch's order."""
    return all_to_all_single_autograd(rows, received, sent, group)

def plain_exchange(rows, sent, received, group):
    """The same without a backward."""
    out = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(out, rows.detach(), received, sent, group=group)
    return out

def step_with(exchange):
    """Loss and gradients of this rank."""

    def layer(*args):
        return by_hand.expert_layer(*args, exchange=exchange)

    return lab.step(layer)

truth = lab.alone(by_hand.layer_alone)
found = lab.joined(ranks.run(step_with, torchs_exchange))
right = [name for name in truth if lab.relative_error(found[name], truth[name]) < 1e-12]
plain = ranks.run(step_with, plain_exchange)[0]
has_none = [name for name, value in plain.items() if value is None]
GUESSES = {
    "router": ["router"],
    "experts": ["up", "down"],
    "both": ["router", "up", "down"],
}
name = next(guess for guess, names in GUESSES.items() if names == has_none)
compare("missing", missing, name, options=GUESSES)
print("with PyTorch's functional collective, right to 1e-12:", ", ".join(right))

# %% [markdown]
# The weights of the rows stay at home, so the router gets its gradient, and even the right one here. In a model with
# layers below, their gradients would lack the path through the experts.
#
# **Takeaway: use the functional collective, or write the backward yourself; a plain collective cuts the graph in
# silence.**
#
# ## From here to GPUs and SLURM (core, 2 min)
#
# `torchrun --nproc-per-node=4 -m labcode.train gpt_moe_tiny --parallel.ep 4` trains a GPT of 8 experts a layer on four
# ranks of dp, and srun starts the same on many nodes. The code is the same on GPUs, where NCCL sends the rows. With
# `--parallel.tp 2` tp cuts the experts as well, and `--parallel.zero_stage 3` divides them over edp. In a job, ep
# belongs on neighbouring ranks: with labcode's order of the axes, tp varies fastest, then cp, then dp, and so a group
# of ep fills a node before it leaves it.
#
# | here | Megatron-LM | torchtitan |
# |---|---|---|
# | `--parallel.ep` | `--expert-model-parallel-size` | `expert_parallel_degree` |
# | experts cut by tp, or not | `--expert-tensor-parallel-size` | removed in 2026 (pull requests 3167 and 4794) |
# | `--model.num_experts`, `--model.experts_per_token` | `--num-experts`, `--moe-router-topk` | of the model |
# | how rows travel | `--moe-token-dispatcher-type alltoall` | |
#
# What a GPU changes: the splits are needed as Python numbers, so `.tolist()` waits for the device in every layer. And a
# loop over experts becomes one grouped matmul (`torch.nn.functional.grouped_mm`; Megatron-LM's `--moe-grouped-gemm`).
#
# ## Questions (core, 4 min)
#
# **1.** Why does the all-to-all of the counts come before that of the rows?
#
# <details><summary>Answer</summary>
#
# A rank needs memory for what arrives, and the number of rows for each of its experts. Only the senders know both.
# </details>
#
# **2.** dp = 8, ep = 4. Over how many ranks is an expert's gradient summed, and by what is it divided?
#
# <details><summary>Answer</summary>
#
# Over edp = 2 ranks; the rows of four ranks are in it already. It is divided by dp = 8.
# </details>
#
# **3.** Your gradients of experts are exactly ep times too long, and the loss curve looks as always. Why, and what does
# suffer?
#
# <details><summary>Answer</summary>
#
# AdamW divides by the usual size of each gradient, so a constant factor drops out. The norm for clipping is dominated
# by the experts then, so that everything else is clipped too much.
# </details>
#
# **4.** Why must a rank without rows call its experts all the same?
#
# <details><summary>Answer</summary>
#
# Otherwise its experts have no gradient, and it may be missing in collectives of backward, in which the others wait.
# </details>
#
# **5.** From lesson 09: where does f belong, and which tensors pass it in front of experts that tp cuts, if there is no
# sequence parallelism and the router stands before it?
#
# <details><summary>Answer</summary>
#
# Where a tensor enters computations that differ by rank: the tokens, and the weights of the rows, which are multiplied
# with partial sums.
# </details>
#
# ## Recap
#
# | | |
# |---|---|
# | ep | experts divided over neighbours of dp; tokens travel |
# | dispatch | sort by expert, all-to-all of counts, uneven all-to-all of rows, sort again |
# | backward of the all-to-all | the same, with sent and received exchanged |
# | gradient of an expert | summed over edp, divided by dp |
# | norm | squares of experts summed over ep, everything else counted once |
# | router and tp | before the all-gather; the weights pass it with the tokens |
# | bytes | four times T k H b (ep-1)/ep in a layer |
# | rows or weights | equal at 9 E F / (4 k) tokens on a rank |
#
# ## Sources
#
# - Lepikhin et al. 2020, *GShard*, arXiv:2006.16668, section 3.2: experts over devices, and the all-to-all.
# - Rajbhandari et al. 2022, *DeepSpeed-MoE*, arXiv:2201.05596, section 5: experts with tensor parallelism.
# - DeepSeek-AI 2024, *DeepSeek-V3 Technical Report*, arXiv:2412.19437, sections 2.1.2, 3.2 and 3.3: at most four nodes
#   for a token, and what hides the all-to-all.
# - Jiang et al. 2024, *Mixtral of Experts*, arXiv:2401.04088: the sizes of Mixtral 8x7B.
# - PyTorch, issue 160285: <https://github.com/pytorch/pytorch/issues/160285>, and torchtitan, pull request 1551:
#   <https://github.com/pytorch/torchtitan/pull/1551>: gradients ep times too long; PyTorch, pull request 167178:
#   <https://github.com/pytorch/pytorch/pull/167178>: the same where an expert has no replica.
# - torchtitan, pull requests 3167: <https://github.com/pytorch/torchtitan/pull/3167> and 4794:
#   <https://github.com/pytorch/torchtitan/pull/4794>: experts are cut by ep, and no longer by tp.
# - Megatron-LM, pull request 5916: <https://github.com/NVIDIA/Megatron-LM/pull/5916>: a norm without some of the
#   experts.
# - torchtitan, issue 2387: <https://github.com/pytorch/torchtitan/issues/2387>, and pull request 4054:
#   <https://github.com/pytorch/torchtitan/pull/4054>: gradients of the router, and of what is below, that nobody sums.

# %%
ranks.close()
