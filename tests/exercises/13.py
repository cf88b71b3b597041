"""Answers to the exercises of lesson 13, sharded data parallelism."""

import torch
import torch.distributed as dist
from answers import Answers, changed, solution_of
from torch import nn
from torch.distributed.fsdp import fully_shard

from course.labs import l13_layouts
from course.labs.l13_layouts import Layout
from labcode.parallel.zero.cut import piece_of, rows_of

# ---- 13.1 my rows


def by_chunk(weight, group):
    parts = weight.chunk(group.size())
    me = group.rank()
    return parts[me] if me < len(parts) else weight[:0]


def by_narrow(weight, group):
    rows = weight.shape[0]
    each = (rows + group.size() - 1) // group.size()
    first = min(group.rank() * each, rows)
    return weight.narrow(0, first, min(each, rows - first))


def by_split(weight, group):
    each = -(-weight.size(0) // dist.get_world_size(group))
    parts = list(weight.split(each, dim=0))
    while len(parts) < dist.get_world_size(group):
        parts.append(weight[len(weight) :])
    return parts[dist.get_rank(group)]


EACH = "-(-len(weight) // dist.get_world_size(group))"
FIRST = "dist.get_rank(group) * each"
SLICE = "weight[first : first + each]"

OWN_ROWS = Answers(
    solves="own_rows",
    right={"chunk": by_chunk, "narrow": by_narrow, "split": by_split},
    wrong={
        "rounded down": (
            changed(f"{EACH} => len(weight) // dist.get_world_size(group)"),
            "how many does each rank get",
        ),
        "chunk alone": (
            changed(f"{SLICE} => weight.chunk(group.size())[group.rank()]"),
            "is there a part for each rank",
        ),
        "tensor_split": (
            changed(f"{SLICE} => weight.tensor_split(group.size())[group.rank()]"),
            "how many does each rank get",
        ),
        "rounded to the nearest": (
            changed(f"{EACH} => max(1, round(len(weight) / group.size() + 0.25))"),
            "how many does each rank get",
        ),
        "None where there are no rows": (
            changed("return => if first < len(weight): return"),
            "a view of 0 rows",
        ),
        "a copy": (changed(f"{SLICE} => {SLICE}.clone()"), "but a copy of them"),
        "a list": (changed(f"{SLICE} => {SLICE}.tolist()"), "returned a list"),
        "by columns": (
            changed("len(weight) => weight.shape[1]", "weight[first => weight[:, first"),
            "rows are whole",
        ),
        "all rows": (changed(f"{SLICE} => weight"), "it returned all rows"),
        "the world": (changed("(group) => ()"), "with ranks 0-3 it is right"),
        "rank of the world": (
            changed("get_rank(group) => get_rank()"),
            "with ranks 0-3 it is right",
        ),
        "the next rows": (
            changed(f"{FIRST} => (dist.get_rank(group) + 1) % group.size() * each"),
            "where do yours begin",
        ),
        "numbers, not rows": (
            changed("len(weight) => weight.numel()", "weight[first => weight.flatten()[first"),
            "rows are whole",
        ),
        "labcode's own": (
            changed(f"{SLICE} => piece_of(weight, group.rank(), group.size())"),
            "labcode's own answer",
        ),
    },
)


# ---- 13.2 an optimizer of which each rank keeps a part


class InOneMessage:
    """Everything in one all-gather; plain tensors in the place of parameters."""

    def __init__(self, params, make, group):
        self.params = [*params]
        self.group = group
        self.mine = [piece_of(param.data, group.rank(), group.size()) for param in self.params]
        self.opt = make(self.mine)

    def step(self):
        p = self.group.size()
        for tensor, param in zip(self.mine, self.params):
            tensor.grad = None
            if param.grad is not None:
                tensor.grad = piece_of(param.grad, self.group.rank(), p).clone()
        self.opt.step()
        sizes = [piece_of(param, 0, p).numel() for param in self.params]
        message = torch.zeros(sum(sizes), dtype=torch.float64)
        for place, tensor in zip(message.split(sizes), self.mine):
            place[: tensor.numel()] = tensor.reshape(-1)
        gathered = torch.empty(p * len(message), dtype=torch.float64)
        dist.all_gather_into_tensor(gathered, message, group=self.group)
        for rank, part in enumerate(gathered.split(len(message))):
            for param, place in zip(self.params, part.split(sizes)):
                rows = piece_of(param.data, rank, p)
                rows.copy_(place[: rows.numel()].view_as(rows))

    def zero_grad(self, set_to_none=True):
        for param in self.params:
            param.grad = None


SENDING = """\
                for owner in range(self.p):
                    part = piece_of(param, owner, self.p)
                    dist.broadcast(part, group_src=owner, group=self.group)
"""
PADDED = """\
                mine = torch.zeros_like(piece_of(param, 0, self.p))
                own = piece_of(param, rank, self.p)
                mine[: len(own)] = own
                parts = [torch.empty_like(mine) for _ in range(self.p)]
                dist.all_gather(parts, mine, group=self.group)
                param.copy_(torch.cat(parts)[: len(param)])
"""
WITHOUT_PADDING = """\
                mine = piece_of(param, rank, self.p).contiguous()
                parts = [torch.empty_like(mine) for _ in range(self.p)]
                dist.all_gather(parts, mine, group=self.group)
                param.copy_(torch.cat(parts))
"""
WRITE_BACK = """\
self.inner.step()
        for param, rows in zip(self.params, self.rows):
            piece_of(param.data, rank, self.p).copy_(rows.data)
"""
BROADCAST = "dist.broadcast(part, group_src=owner, group=self.group)"
OF_GRADIENT = "piece_of(param.grad, rank, self.p)"

OPTIMIZER = Answers(
    solves="ShardedOptimizer",
    right={
        "padded all-gathers": changed(f"{SENDING} => {PADDED}"),
        "one message": InOneMessage,
        "copies written back": changed(
            "nn.Parameter(own) => nn.Parameter(own.clone())", f"self.inner.step()\n => {WRITE_BACK}"
        ),
    },
    wrong={
        "state for the whole weight": (
            changed(
                "piece_of(param.detach(), dist.get_rank(group), self.p) => param.detach()",
                f"{OF_GRADIENT} => param.grad",
            ),
            "was given whole weights",
        ),
        "a generator": (changed("list(params) => params"), "finds nothing"),
        "nobody waits": (
            changed("group=self.group => group=self.group, async_op=True"),
            "waited for: ",
        ),
        "stops at None": (changed("if param.grad is None: => if False:"), "whose `grad` is None?"),
        "the last gradient again": (
            changed("rows.grad = None => pass"),
            "it had no gradient in this step",
        ),
        "zeros for None": (
            changed("rows.grad = None => rows.grad = torch.zeros_like(rows)"),
            "it had no gradient in this step",
        ),
        "copies": (
            changed("nn.Parameter(own) => nn.Parameter(own.clone())"),
            "share the memory of the weight",
        ),
        "nothing sent": (changed(f"{BROADCAST} => pass"), "how do they get there?"),
        "by the rank of the world": (
            changed("group_src=owner => src=owner"),
            "with ranks 0-3 it is right",
        ),
        "in the world": (
            changed("group_src=owner, group=self.group => src=owner"),
            "with ranks 0-3 it is right",
        ),
        "the next rank's rows": (
            changed("group_src=owner => group_src=(owner + 1) % self.p"),
            "the old ones",
        ),
        "zero_grad forgotten": (changed("param.grad = None => pass"), "after zero_grad()"),
        "an optimizer for each weight": (
            changed(
                "make(self.rows) => [make([rows]) for rows in self.rows]",
                "self.inner.step() => [inner.step() for inner in self.inner]",
            ),
            "`make` was called 4 times",
        ),
        "no gradients": (changed(f"rows.grad = {OF_GRADIENT} => pass"), "have no `.grad`"),
        "averaged twice": (changed(f"{OF_GRADIENT} => {OF_GRADIENT} / self.p"), "averages already"),
        "gradients of the first step": (
            changed("rows.grad = => rows.grad = rows.grad if rows.grad is not None else"),
            "are they those of this step?",
        ),
        "no padding": (changed(f"{SENDING} => {WITHOUT_PADDING}"), "all_gather"),
        "an all-reduce of the weights": (
            changed(
                f"{BROADCAST} => part *= owner == rank\n"
                "                    dist.all_reduce(part, group=self.group)"
            ),
            "what is there to add up?",
        ),
        "one rank sends": (
            changed("for owner in range(self.p) => for owner in range(self.p if rank == 0 else 0)"),
            "broadcast",
        ),
        "labcode's own": (
            changed(
                "with torch.no_grad(): => "
                "from labcode.parallel.zero.optimizer import gather_weights\n"
                "        gather_weights(self.params, self.group)\n"
                "        with torch.no_grad():"
            ),
            "labcode's own answer",
        ),
        "zero_grad writes zeros": (
            changed(
                "            param.grad = None =>             if param.grad is not None:\n"
                "                param.grad.zero_()"
            ),
            "after zero_grad() the gradients are zeros, and not None",
        ),
    },
)


# ---- 13.3 the average of my rows


def padded_weights(params, rows, group):
    """Pads each weight to p equal parts, and sends them all in one tensor."""
    p = dist.get_world_size(group)
    columns = []
    for param in params:
        each = -(-len(param) // p)
        padded = param.grad.new_zeros(p * each, *param.shape[1:])
        padded[: len(param)] = param.grad / p
        columns.append(padded.view(p, -1))
        param.grad = None
    message = torch.cat(columns, dim=1)
    received = message.new_empty(message.shape[1])
    dist.reduce_scatter_tensor(received, message.flatten(), group=group)
    for row, part in zip(rows, received.split([column.shape[1] for column in columns])):
        row.grad = part[: row.numel()].reshape(row.shape).clone()


def all_reduced(params, rows, group):
    for param, row in zip(params, rows):
        dist.all_reduce(param.grad, group=group)
        row.grad = piece_of(param.grad / group.size(), group.rank(), group.size()).clone()
        param.grad = None


REDUCE_SCATTER = "dist.reduce_scatter(own, list(parts), group=group)"
ONE_FOR_EACH = """\
if len(params) > 1:
        for param, row in zip(params, rows):
            average_own_rows([param], [row], group)
        return
    p = dist"""

AVERAGE = Answers(
    solves="average_own_rows",
    right={
        "each weight padded": padded_weights,
        "a handle": changed(
            f"{REDUCE_SCATTER} => work = {REDUCE_SCATTER[:-1]}, async_op=True)\n    work.wait()"
        ),
        "parts of their own length": changed(
            "params[0].grad.new_zeros(p, length) => []",
            "parts[rank, : len(numbers)] = numbers => parts.append(numbers)",
            "empty_like(parts[0]) => empty_like(parts[dist.get_rank(group)])",
        ),
    },
    wrong={
        "an all-reduce": (all_reduced, "the sum of its own part only"),
        "one for each weight": (changed(f"p = dist => {ONE_FOR_EACH}"), "one message is enough"),
        "a sum": (changed("own /= p => pass"), "4 times as large as the mean"),
        "divided by the world size": (
            changed("own /= p => own /= dist.get_world_size()"),
            "0.75 times as large as the mean",
        ),
        "in the world": (changed("), group=group => )"), "with ranks 0-3"),
        "gradients kept": (changed("param.grad = None => pass"), "still holds a whole gradient"),
        "added up": (
            changed("row.grad = own => row.grad = (0 if row.grad is None else row.grad) + own"),
            "it takes its place",
        ),
        "the next rank's rows": (
            changed("param.grad, rank, p => param.grad, (rank + 1) % p, p"),
            "of the weight [7, 3]",
        ),
        "cut after joining": (
            changed(
                "sum(piece_of(param, 0, p).numel() for param in params) => "
                "-(-sum(param.numel() for param in params) // p)",
                "piece_of(param.grad, rank, p).flatten() => param.grad.flatten()",
                "torch.cat(pieces) => torch.cat(pieces)[rank * length : (rank + 1) * length]",
                "own /= p => own = F.pad(own / p, (0, 100))",
            ),
            "right numbers in wrong places",
        ),
        "nobody waits": (
            changed("), group=group => ), group=group, async_op=True"),
            "waited for: ",
        ),
        "float32": (
            changed("params[0].grad.new_zeros(p, length) => torch.zeros(p, length)"),
            "dtype 'float'",
        ),
        "nothing sent": (
            changed(f"{REDUCE_SCATTER} => own = parts[dist.get_rank(group)]"),
            "did anything travel?",
        ),
        "weights": (changed("piece_of(param.grad => piece_of(param.detach()"), "the weight [7, 3]"),
        "unpacked by the first rank's sizes": (
            changed("first = stop => first += piece_of(param, 0, p).numel()"),
            "on the rank that sends and on the one that receives",
        ),
        "travels in float32": (
            changed(
                "new_zeros(p, length) => new_zeros(p, length, dtype=torch.float32)",
                "view_as(row) => view_as(row).double()",
            ),
            "where do the numbers cease to be float64?",
        ),
    },
)


# ---- 13.4 a layer that borrows its weight


class ByOwnPieces(nn.Module):
    """Remembers whether the weight is whole, and fills it piece by piece."""

    def __init__(self, weight, group):
        super().__init__()
        self.group = group
        self.rows = nn.Parameter(piece_of(weight, group.rank(), group.size()).clone())
        self.weight = nn.Parameter(weight.clone())
        self.num_bytes = self.weight.nbytes
        self.weight.register_post_accumulate_grad_hook(self.gradient_ready)
        self.reshard()

    def reshard(self):
        self.weight.untyped_storage().resize_(0)
        self.is_whole = False

    def gather(self):
        if self.is_whole:
            return
        p = dist.get_world_size(self.group)
        longest = rows_of(len(self.weight), 0, p)[1]
        mine = self.rows.new_zeros(longest, self.rows.shape[1])
        with torch.no_grad():
            mine[: self.rows.shape[0]].copy_(self.rows)
        arrived = list(mine.new_empty(p, *mine.shape))
        work = dist.all_gather(arrived, mine, group=self.group, async_op=True)
        self.weight.untyped_storage().resize_(self.num_bytes)
        work.wait()
        for rank, part in enumerate(arrived):
            place = piece_of(self.weight.data, rank, p)
            place.copy_(part[: len(place)])
        self.is_whole = True

    def forward(self, x):
        self.gather()
        y = x @ self.weight.t()
        self.reshard()
        if torch.is_grad_enabled():
            y.register_hook(lambda grad: self.gather())
        return y

    def gradient_ready(self, weight):
        p = self.group.size()
        parts = [piece_of(weight.grad, rank, p) / p for rank in range(p)]
        mine = torch.empty_like(parts[self.group.rank()])
        dist.reduce_scatter(mine, parts, group=self.group)
        self.rows.grad = mine if self.rows.grad is None else self.rows.grad + mine
        weight.grad = None
        self.reshard()


WHOLE = "torch.cat(parts)[: len(self.weight)]"
COPY = f"self.weight.data.copy_({WHOLE})"
LINEAR = "F.linear(x, self.weight)"
MEAN = "own[: len(self.rows)] / self.p"
GET_BACK = "resize_(self.num_bytes)"
ALL_GATHER = "dist.all_gather(parts, own, group=self.group)"
REDUCE = "dist.reduce_scatter(own, list(whole.split(each)), group=self.group)"
OWN_OF_WHOLE = "own = piece_of(whole, dist.get_rank(self.group), self.p)"

BORROWED = Answers(
    solves="BorrowingLinear",
    right={
        "into one tensor": changed(
            f"{ALL_GATHER} => whole = torch.cat(parts)\n"
            "        dist.all_gather_into_tensor(whole, own, group=self.group)",
            f"{COPY} => self.weight.data[:] = whole[: len(self.weight)]",
            f"{REDUCE} => dist.reduce_scatter_tensor(own, whole, group=self.group)",
        ),
        "piece by piece": ByOwnPieces,
        "a product with the transpose": changed(f"{LINEAR} => x @ self.weight.T"),
        "the shape of a weight without memory": changed(
            "self.rows.new_zeros(each, self.rows.shape[1]) => "
            "torch.zeros_like(self.weight).new_zeros(each, self.weight.shape[1])",
        ),
    },
    wrong={
        "memory forgotten": (
            changed(f"self.weight.untyped_storage().{GET_BACK} => pass"),
            "while its storage had no memory",
        ),
        "written through detach": (
            changed("self.weight.data.copy_ => self.weight.detach().copy_"),
            "autograd has seen",
        ),
        "written under no_grad": (
            changed(f"{COPY} => with torch.no_grad(): self.weight.copy_({WHOLE})"),
            "autograd has seen",
        ),
        "the padding stays": (changed(f"{WHOLE} => torch.cat(parts)"), "must match"),
        "no padding": (
            changed("self.rows.new_zeros(each, self.rows.shape[1]) => torch.empty_like(self.rows)"),
            "all_gather",
        ),
        "not freed after forward": (
            changed("self.reshard()\n        if y => if y"),
            "after forward the weight still has its memory",
        ),
        "not freed after backward": (
            changed("self.reshard()\n        own => own"),
            "after backward the weight still has its memory",
        ),
        "gathered for forward only": (
            changed("y.register_hook(self.before_backward) => pass"),
            "while its storage had no memory",
        ),
        "the whole gradient kept": (
            changed("weight.grad = None => pass"),
            "`weight.grad` still holds",
        ),
        "set": (changed("grad += mean => grad = mean"), "has replaced `rows.grad`"),
        "a sum": (changed(f"{MEAN} => own[: len(self.rows)]"), "4 times as large as the mean"),
        "divided by the world size": (
            changed(f"{MEAN} => own[: len(self.rows)] / dist.get_world_size()"),
            "0.75 times as large",
        ),
        "a copy of the whole": (
            changed(
                "self.num_bytes = => self.whole = weight.clone()\n        self.num_bytes =",
                f"{WHOLE} => self.whole",
            ),
            "that of the beginning",
        ),
        "in the world": (
            changed("self.group = group => self.group = dist.group.WORLD"),
            "with ranks 0-3 it is right",
        ),
        "no question": (changed("if y.requires_grad: => if True:"), "cannot register a hook"),
        "a new tensor": (
            changed(
                "untyped_storage().resize_(0) => data = self.weight.data.new_empty(0)",
                f"self.weight.untyped_storage().{GET_BACK} => pass",
                "each = -(-len(self.weight) => each = -(-7",
                f"{COPY} => self.weight.data = torch.cat(parts)[:7]",
            ),
            "a weight [7, 6] on 4 ranks",
        ),
        "an all-reduce": (
            changed(
                f"{REDUCE} => dist.all_reduce(whole, group=self.group)\n        {OWN_OF_WHOLE}"
            ),
            "who sums the gradient",
        ),
        "other rows": (
            changed("= weight.grad\n => = weight.grad.roll(1, 0)\n"),
            "which rows of the gradient go to which rank?",
        ),
        "nothing summed": (changed(f"{REDUCE} => {OWN_OF_WHOLE}"), "who sums the gradient"),
        "holds what has arrived": (
            changed(f"{COPY} => {COPY}\n        self.arrived = self.weight.data.clone()"),
            "Who holds them?",
        ),
        "holds the parts": (
            changed(f"{COPY} => {COPY}\n        self.parts = parts"),
            "Who holds them?",
        ),
        "a clone": (changed(f"{LINEAR} => F.linear(x, self.weight.clone())"), "Who holds them?"),
        "a sum with zero": (
            changed(f"{LINEAR} => F.linear(x, self.weight + 0.0)"),
            "Who holds them?",
        ),
        "a contiguous transpose": (
            changed(f"{LINEAR} => x @ self.weight.T.contiguous()"),
            "Who holds them?",
        ),
        "numbers for bytes": (
            changed(f"{GET_BACK} => resize_(self.weight.numel())"),
            "in what does the storage count?",
        ),
        "four bytes a number": (
            changed(f"{GET_BACK} => resize_(4 * self.weight.numel())"),
            "in what does the storage count?",
        ),
        "nobody waits": (
            changed(f"{ALL_GATHER} => {ALL_GATHER[:-1]}, async_op=True)"),
            "waited for: ",
        ),
        "nobody waits in backward": (
            changed(f"{REDUCE} => {REDUCE[:-1]}, async_op=True)"),
            "waited for: ",
        ),
    },
)


# ---- 13.7 a layout


def by_hand(s):
    """The bytes written out, a table, and a sort."""
    n = s.num_parameters
    p = s.nodes * s.ranks_per_node
    g = s.ranks_per_node
    borrowed = 4 * n / s.num_layers
    slow = s.inside_bytes_per_s
    if s.nodes > 1:
        slow = min(s.inside_bytes_per_s, s.between_bytes_per_s)
    whole = 2 * (p - 1) / p * 2 * n / slow
    inside = 3 * (g - 1) / g * 2 * n / s.inside_bytes_per_s
    across = 2 * (s.nodes - 1) / s.nodes * 2 * n / s.between_bytes_per_s
    table = [
        (whole, 0, p, 16 * n),
        (whole, 1, p, 4 * n + 12 * n / p),
        (whole, 2, p, 2 * n + 14 * n / p),
        (1.5 * whole, 3, p, 16 * n / p + borrowed),
        (inside + across, 3, g, 16 * n / g + borrowed),
    ]
    for sending, stage, ranks, kept in sorted(table):
        if kept <= s.room_bytes:
            return Layout(stage, ranks, kept, sending)
    return None


LAYOUT = Answers(
    solves="choose",
    takes_ranks=False,
    right={
        "by hand": by_hand,
        "a plain tuple": changed("return min( => return tuple(min(", ".sending_s) => .sending_s))"),
    },
    wrong={
        "does not fit": (
            changed("if kept <= situation.room_bytes: => if True:"),
            "and there is room for",
        ),
        "the borrowed units forgotten": (
            changed("kept += 2 * message_bytes / situation.num_layers => pass"),
            "and kept_bytes says",
        ),
        "no hybrid": (
            changed("candidates(situation): => candidates(situation)[:4]:"),
            "something else that fits",
        ),
        "always stage 3": (
            changed("candidates(situation): => candidates(situation)[3:]:"),
            "something else that fits",
        ),
        "stage 3 sends as little": (
            changed("collectives = 3 => collectives = 2"),
            "and sending_s says",
        ),
        "the fast link": (
            changed("link = min(link, situation.between_bytes_per_s) => pass"),
            "and sending_s says",
        ),
        "nothing between the copies": (
            changed("sending_s += across / situation.between_bytes_per_s => pass"),
            "and sending_s says",
        ),
        "a pair": (changed("return min => return (3, 8) or min"), "return Layout(...)"),
        "another stage": (changed("Layout(stage, p => Layout(4, p"), "none of the candidates"),
        "the lab's": (l13_layouts.best, "labcode's own answer"),
    },
)


# ---- 13.6 the script: text, as the check reads the source of a function

SCRIPT = solution_of("13b", "main")

OTHER_STYLE = """
def main(folder, steps, dtype):
    from torch.distributed.checkpoint.state_dict import (
        get_model_state_dict,
        get_optimizer_state_dict,
        set_model_state_dict,
        set_optimizer_state_dict,
    )

    dist.init_process_group()
    where = "cpu"
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank())
        where = "cuda"
    rounded = {"mp_policy": MixedPrecisionPolicy(dtype, torch.float32)}
    net = build_model()
    [fully_shard(block, **rounded) for block in net.blocks]
    net = fully_shard(net, **rounded)
    sgd = torch.optim.SGD(net.parameters(), 0.1, 0.9)
    where_to = str(Path(folder) / "checkpoint")

    def content(step):
        return {
            "model": get_model_state_dict(net),
            "optimizer": get_optimizer_state_dict(net, sgd),
            "step": torch.tensor(step),
        }

    step = 0
    if os.path.isdir(where_to):
        read = content(0)
        dcp.load(read, checkpoint_id=where_to)
        set_model_state_dict(net, read["model"])
        set_optimizer_state_dict(net, sgd, read["optimizer"])
        step = int(read["step"])
    while step < steps:
        first, second = micro_batches(step, where)
        net.set_requires_gradient_sync(False)
        (0.5 * gpt.loss(net(first[0]), first[1])).backward()
        net.set_requires_gradient_sync(True)
        (0.5 * gpt.loss(net(second[0]), second[1])).backward()
        norm = nn.utils.get_total_norm([param.grad for param in net.parameters()])
        nn.utils.clip_grads_with_norm_(net.parameters(), 0.6, norm)
        sgd.step()
        sgd.zero_grad()
        step += 1
    dcp.save(content(steps), storage_writer=dcp.FileSystemWriter(where_to))
    dist.destroy_process_group()
"""

AS_STATEFUL = """
def main(folder, steps, dtype):
    class Training:
        def __init__(self, model, optimizer):
            self.model, self.optimizer, self.step = model, optimizer, 0

        def state_dict(self):
            return get_state_dict(self.model, self.optimizer)

    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend)
    local_rank = int(os.environ["LOCAL_RANK"])
    device = f"cuda:{local_rank}" if backend == "nccl" else "cpu"
    if backend == "nccl":
        torch.cuda.set_device(local_rank)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    model = build_model()
    for module in [*model.blocks, model]:
        fully_shard(module, mp_policy=policy, reshard_after_forward=module is not model)
    training = Training(model, torch.optim.SGD(model.parameters(), lr=1e-1, momentum=9e-1))
    if (folder / "checkpoint" / ".metadata").exists():
        weights, state = training.state_dict()
        read = {"model": weights, "optimizer": state, "step": 0}
        dcp.load(read, storage_reader=dcp.FileSystemReader(folder / "checkpoint"))
        set_state_dict(
            model,
            training.optimizer,
            model_state_dict=read["model"],
            optim_state_dict=read["optimizer"],
        )
        training.step = read["step"]
    for step in range(training.step, steps):
        batches = micro_batches(step, device)
        while batches:
            inputs, targets = batches.pop(0)
            model.set_requires_gradient_sync(not batches)
            loss = gpt.loss(model(inputs), targets)
            (loss / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.6)
        training.optimizer.step()
        training.optimizer.zero_grad(set_to_none=True)
    weights, state = training.state_dict()
    content = {"model": weights, "optimizer": state, "step": steps}
    dcp.save(content, checkpoint_id=str(folder / "checkpoint"))
    dist.destroy_process_group()
"""

MADE = "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)\n"
BLOCKS = "    for block in model.blocks:\n        fully_shard(block, mp_policy=policy)\n"
ZERO = "        optimizer.zero_grad()\n"


def with_change(*changes):
    """The script with some of its text replaced, in pairs of old and new."""
    text = SCRIPT
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert old in text
        text = text.replace(old, new)
    return text


WRITTEN = Answers(
    solves="main",
    takes_ranks=False,
    real=True,
    right={
        "in another style": OTHER_STYLE,
        "with a class of its own": AS_STATEFUL,
    },
    wrong={
        "the optimizer first": (
            with_change(
                MADE, "", "    policy =", f"    model = build_model()\n{MADE}    policy ="
            ).replace("    model = build_model().to(device)\n", ""),
            "the optimizer holds parameters that the model no longer has",
        ),
        "blocks forgotten": (with_change(BLOCKS, ""), "all weights are one unit"),
        "nothing sharded": (
            with_change(BLOCKS, "", "    fully_shard(model, mp_policy=policy)\n", ""),
            "the model was not given to fully_shard",
        ),
        "gradients travel each time": (
            with_change("number == len(batches) - 1", "True"),
            "the gradients travel after each micro-batch",
        ),
        "gradients never travel": (
            with_change("number == len(batches) - 1", "False"),
            "the weights are those from the start",
        ),
        "the loss not divided": (
            with_change(" / len(batches)", ""),
            "divide each loss by their number",
        ),
        "not clipped": (
            with_change("        nn.utils.clip_grad_norm_(model.parameters(), 0.6)\n", ""),
            "not clipped to a norm of 0.6",
        ),
        "zero_grad for each micro-batch": (
            with_change(
                ZERO,
                "",
                "            loss =",
                "            optimizer.zero_grad()\n            loss =",
                "number == len(batches) - 1",
                "True",
            ),
            "only the last micro-batch of a step is in its gradient",
        ),
        "zero_grad forgotten": (
            with_change(ZERO, ""),
            "the gradients of earlier steps are still in those of the next",
        ),
        "no momentum": (with_change(", momentum=0.9", ""), "momentum=0.9"),
        "nothing saved": (
            with_change("    dcp.save(", "    dict("),
            "there is no checkpoint",
        ),
        "the optimizer not saved": (
            with_change('"optimizer": state, "step": steps', '"step": steps'),
            'the checkpoint has no "optimizer"',
        ),
        "the checkpoint not read": (
            with_change("checkpoint.exists()", "False"),
            "it began anew at step 0",
        ),
        "the steps done not read": (
            with_change('        done = saved["step"]\n', ""),
            "it began anew at step 0",
        ),
        "the checkpoint read and not used": (
            with_change(
                "        weights, state = get_state_dict(model, optimizer)\n        saved",
                "        other = fully_shard(build_model())\n"
                "        spare = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)\n"
                "        weights, state = get_state_dict(other, spare)\n        saved",
                SCRIPT[SCRIPT.index("        set_state_dict(") : SCRIPT.index("        done =")],
                "",
            ),
            "but from the weights of build_model()",
        ),
        "the optimizer not read": (
            with_change(
                SCRIPT[SCRIPT.index("        set_state_dict(") : SCRIPT.index("        done =")],
                "        optimizer.state.clear()\n",
            ),
            "but not the optimizer's momentum",
        ),
        "no policy": (
            with_change(", mp_policy=policy", ""),
            "does fully_shard get the policy",
        ),
        "the model in bfloat16": (
            with_change(", mp_policy=policy", "", "build_model().", "build_model().to(dtype)."),
            "they stay in float32",
        ),
        "autocast in place of the policy": (
            with_change(
                ", mp_policy=policy",
                "",
                "            loss = gpt.loss(model(inputs), targets) / len(batches)\n",
                "            with torch.autocast('cpu', dtype, dtype != torch.float32):\n"
                "                loss = gpt.loss(model(inputs), targets) / len(batches)\n",
            ),
            "the weights travel in float32",
        ),
        "gradients added up in bfloat16": (
            with_change(", reduce_dtype=torch.float32", ""),
            "the gradients travel in bfloat16",
        ),
        "rank 0 alone saves": (
            with_change("    dcp.save(", "    if dist.get_rank() == 0: dcp.save("),
            "on 2 ranks: ",
        ),
        "left open": (
            with_change("    dist.destroy_process_group()\n", ""),
            "dist.destroy_process_group()",
        ),
        "a barrier of rank 0": (
            changed(
                "dist.destroy_process_group() => if dist.get_rank() == 0:\n        dist.barrier()\n"
                "    dist.destroy_process_group()"
            ),
            "rank 0 waits in barrier (main, line",
        ),
    },
)


# ---- 13.5 units of FSDP2


def shard_backwards(model, mesh):
    """From the end of the model to its beginning."""
    fully_shard([model.norm, model.head], mesh=mesh, reshard_after_forward=False)
    for layer in reversed(model.layers):
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)


def shard_by_children(model, mesh):
    for name, child in model.named_children():
        if name == "layers":
            for layer in child:
                fully_shard(layer, mesh=mesh)
    fully_shard([model.head, model.norm], mesh=mesh, reshard_after_forward=False)
    return fully_shard(model, mesh=mesh)


def shard_the_embedding_too(model, mesh):
    """The unit of the model is then empty."""
    fully_shard(model.embedding, mesh=mesh)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard([model.norm, model.head], mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)


def shard_from_outside(model, mesh):
    fully_shard(model, mesh=mesh)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)


def shard_every_product(model, mesh):
    for layer in model.layers:
        fully_shard(layer.up, mesh=mesh)
        fully_shard(layer.down, mesh=mesh)
        fully_shard(layer, mesh=mesh)
    fully_shard([model.norm, model.head], mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)


OF_LAYERS = "for layer in model.layers:\n        fully_shard(layer, mesh=mesh)"
OF_LAST = "fully_shard(last, mesh=mesh, reshard_after_forward=False)"
OF_MODEL = "fully_shard(model, mesh=mesh)"

UNITS = Answers(
    solves="shard",
    real=True,
    right={
        "from the end": shard_backwards,
        "by children": shard_by_children,
        "a unit for the embedding": shard_the_embedding_too,
    },
    wrong={
        "the model first": (shard_from_outside, "begin inside and end with the model"),
        "the products": (shard_every_product, "a unit is a whole layer"),
        "without the model": (
            changed(f"{OF_MODEL} => pass"),
            "the model was not given to fully_shard",
        ),
        "two modules outside of all units": (
            changed(f"{OF_LAST} => pass", f"{OF_MODEL} => pass"),
            "embedding.weight, norm.weight, norm.bias and head.weight are whole on every rank",
        ),
        "nothing": (
            changed(f"{OF_LAYERS} => pass", f"{OF_LAST} => pass", f"{OF_MODEL} => pass"),
            "no parameter is sharded",
        ),
        "the model alone": (
            changed(f"{OF_LAYERS} => pass", f"{OF_LAST} => pass"),
            "the whole model is one unit",
        ),
        "the layers as a list": (
            changed(f"{OF_LAYERS} => fully_shard(list(model.layers), mesh=mesh)"),
            "the layers are one unit",
        ),
        "two units at the end": (
            changed(
                f"{OF_LAST} => for module in last:\n"
                "        fully_shard(module, mesh=mesh, reshard_after_forward=False)"
            ),
            "norm and head are two units",
        ),
        "no unit at the end": (changed(f"{OF_LAST} => pass"), "in the unit of the model"),
        "resharded at the end": (
            changed(", reshard_after_forward=False => "),
            "gathered again as soon as backward begins",
        ),
        "everything kept": (
            changed(
                "fully_shard(layer, mesh=mesh) => "
                "fully_shard(layer, mesh=mesh, reshard_after_forward=False)"
            ),
            "each layer is gathered once",
        ),
        "without the mesh": (changed(", mesh=mesh => "), "the mesh has 2"),
    },
)


ANSWERS = {
    "13.1": OWN_ROWS,
    "13.2": OPTIMIZER,
    "13.3": AVERAGE,
    "13.4": BORROWED,
    "13.5": UNITS,
    "13.6": WRITTEN,
    "13.7": LAYOUT,
}
