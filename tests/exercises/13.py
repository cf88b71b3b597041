"""Answers to the exercises of lesson 13, sharded data parallelism."""

import functools
import tempfile

import torch
import torch.distributed as dist
from answers import Answers, solution_of
from torch import nn
from torch.nn import functional as F

from labcode.parallel.zero import optimizer
from labcode.parallel.zero.cut import piece_of, rows_of
from labcode.perf.state_memory import state_bytes
from labcode.teach.exercises import l13, l13_script
from labcode.teach.labs import l13_layouts
from labcode.teach.labs.l13_layouts import Layout, candidates

# ---- 13.1 my rows


def rounded_up(weight, group):
    p = dist.get_world_size(group)
    each = -(-len(weight) // p)
    first = dist.get_rank(group) * each
    return weight[first : first + each]


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


def rounded_down(weight, group):
    each = len(weight) // group.size()
    return weight[group.rank() * each : (group.rank() + 1) * each]


def chunk_alone(weight, group):
    return weight.chunk(group.size())[group.rank()]


def tensor_split(weight, group):
    return weight.tensor_split(group.size())[group.rank()]


def of_the_world(weight, group):
    each = -(-len(weight) // dist.get_world_size())
    return weight[dist.get_rank() * each : (dist.get_rank() + 1) * each]


def rank_of_the_world(weight, group):
    each = -(-len(weight) // group.size())
    return weight[dist.get_rank() * each : (dist.get_rank() + 1) * each]


def rounded_to_nearest(weight, group):
    each = max(1, round(len(weight) / group.size() + 0.25))
    return weight[group.rank() * each : (group.rank() + 1) * each]


def none_for_no_rows(weight, group):
    each = -(-len(weight) // group.size())
    first = group.rank() * each
    if first < len(weight):
        return weight[first : first + each]
    return None


def next_rows(weight, group):
    p = group.size()
    each = -(-len(weight) // p)
    number = (group.rank() + 1) % p
    return weight[number * each : (number + 1) * each]


OWN_ROWS = Answers(
    check=l13.own_rows,
    right={"rounded up": rounded_up, "chunk": by_chunk, "narrow": by_narrow, "split": by_split},
    wrong={
        "rounded down": (rounded_down, "how many does each rank get"),
        "chunk alone": (chunk_alone, "IndexError"),
        "tensor_split": (tensor_split, "how many does each rank get"),
        "rounded to the nearest": (rounded_to_nearest, "how many does each rank get"),
        "None where there are no rows": (none_for_no_rows, "a view of 0 rows"),
        "a copy": (lambda weight, group: rounded_up(weight, group).clone(), "but a copy of them"),
        "a list": (lambda weight, group: rounded_up(weight, group).tolist(), "returned a list"),
        "by columns": (lambda weight, group: rounded_up(weight.T, group).T, "rows are whole"),
        "all rows": (lambda weight, group: weight, "it returned all rows"),
        "the world": (of_the_world, "with ranks 0, 1, 2 and 3 it is right"),
        "rank of the world": (rank_of_the_world, "with ranks 0, 1, 2 and 3 it is right"),
        "the next rows": (next_rows, "where do yours begin"),
        "numbers, not rows": (
            lambda weight, group: rounded_up(weight.flatten(), group),
            "rows are whole",
        ),
        "labcode's own": (
            lambda weight, group: piece_of(weight, group.rank(), group.size()),
            "labcode's own answer",
        ),
    },
)


# ---- 13.2 an optimizer of which each rank keeps a part


def own(tensor, group):
    return piece_of(tensor, group.rank(), group.size())


class InTheLesson:
    """As the solution writes it; the mistakes change one thing each."""

    copies = False
    whole_state = False
    sends = True
    by_world_rank = False
    forgets = True
    next_rank = False
    one_each = False
    gives_gradients = True
    divides = False
    in_world = False
    lists = True
    waits = True
    on_none = "skips"

    def __init__(self, params, make, group):
        self.params = list(params) if self.lists else params
        self.group = group
        self.rows = []
        for param in self.params:
            rows = param.detach() if self.whole_state else own(param.detach(), group)
            self.rows.append(nn.Parameter(rows.clone() if self.copies else rows))
        if self.one_each:
            self.inner = [make([rows]) for rows in self.rows]
        else:
            self.inner = [make(self.rows)]

    def step(self):
        for param, rows in zip(self.params, self.rows):
            if param.grad is None and self.on_none == "skips":
                rows.grad = None
                continue
            if param.grad is None and self.on_none == "keeps the last":
                continue
            if param.grad is None and self.on_none == "zeros":
                param.grad = torch.zeros_like(param)
            grad = param.grad if self.whole_state else own(param.grad, self.group)
            if self.divides:
                grad = grad / self.group.size()
            if self.gives_gradients:
                rows.grad = grad
        for inner in self.inner:
            inner.step()
        if self.sends:
            self.send()

    def send(self):
        p = self.group.size()
        with torch.no_grad():
            for param in self.params:
                for rank in range(p):
                    part = piece_of(param, rank, p)
                    if self.in_world:
                        dist.broadcast(part, src=rank)
                    elif self.by_world_rank:
                        dist.broadcast(part, src=rank, group=self.group)
                    elif self.next_rank:
                        dist.broadcast(part, group_src=(rank + 1) % p, group=self.group)
                    elif self.waits:
                        dist.broadcast(part, group_src=rank, group=self.group)
                    else:
                        dist.broadcast(part, group_src=rank, group=self.group, async_op=True)

    def zero_grad(self):
        if self.forgets:
            for param in self.params:
                param.grad = None


def changed(base, **mistakes):
    return type("Changed", (base,), mistakes)


class GathersPadded(InTheLesson):
    """An all-gather of parts of one size, for each weight."""

    @torch.no_grad()
    def send(self):
        p = self.group.size()
        for param, rows in zip(self.params, self.rows):
            each = len(piece_of(param, 0, p))
            mine = param.new_zeros(each, *param.shape[1:])
            mine[: len(rows)] = rows
            parts = [torch.empty_like(mine) for _ in range(p)]
            dist.all_gather(parts, mine, group=self.group)
            param.copy_(torch.cat(parts)[: len(param)])

    def zero_grad(self):
        for param in self.params:
            if param.grad is not None:
                param.grad.zero_()


class InOneMessage:
    """Everything in one all-gather; plain tensors in the place of parameters."""

    def __init__(self, params, make, group):
        self.params = [*params]
        self.group = group
        self.mine = [own(param.data, group) for param in self.params]
        self.opt = make(self.mine)

    def step(self):
        for tensor, param in zip(self.mine, self.params):
            has = param.grad is not None
            tensor.grad = own(param.grad, self.group).clone() if has else None
        self.opt.step()
        p = self.group.size()
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


class AddsUp(InTheLesson):
    """Zeros where the rows of others stand, and a sum."""

    @torch.no_grad()
    def send(self):
        for param in self.params:
            whole = torch.zeros_like(param)
            own(whole, self.group).copy_(own(param, self.group))
            dist.all_reduce(whole, group=self.group)
            param.copy_(whole)


class GathersWithoutPadding(InTheLesson):
    @torch.no_grad()
    def send(self):
        p = self.group.size()
        for param, rows in zip(self.params, self.rows):
            parts = [torch.empty_like(rows) for _ in range(p)]
            dist.all_gather(parts, rows.detach(), group=self.group)
            param.copy_(torch.cat(parts))


class GradientsOnce(InTheLesson):
    """Takes the rows of the first gradient, and never again."""

    def step(self):
        for param, rows in zip(self.params, self.rows):
            if rows.grad is None:
                rows.grad = own(param.grad, self.group).clone()
        self.inner[0].step()
        self.send()


class OnlyTheFirstSends(InTheLesson):
    def send(self):
        if self.group.rank() == 0:
            super().send()


class WritesBack(InTheLesson):
    """Copies, written back into the weight: no view, and right all the same."""

    copies = True

    def send(self):
        for param, rows in zip(self.params, self.rows):
            own(param.data, self.group).copy_(rows.data)
        super().send()


class ByLabcode:
    def __init__(self, params, make, group):
        self.params = list(params)
        self.inner = make([own(param.detach(), group) for param in self.params])
        self.group = group

    def step(self):
        for param, rows in zip(self.params, self.inner.param_groups[0]["params"]):
            rows.grad = None if param.grad is None else own(param.grad, self.group)
        self.inner.step()
        optimizer.gather_weights(self.params, self.group)

    def zero_grad(self):
        for param in self.params:
            param.grad = None


OPTIMIZER = Answers(
    check=l13.sharded_optimizer,
    right={
        "broadcasts": InTheLesson,
        "padded all-gathers": GathersPadded,
        "one message": InOneMessage,
        "copies written back": WritesBack,
    },
    wrong={
        "state for the whole weight": (
            changed(InTheLesson, whole_state=True),
            "was given whole weights",
        ),
        "a generator": (changed(InTheLesson, lists=False), "finds nothing"),
        "nobody waits": (changed(InTheLesson, waits=False), "waited for: "),
        "stops at None": (changed(InTheLesson, on_none="stops"), "whose `grad` is None?"),
        "the last gradient again": (
            changed(InTheLesson, on_none="keeps the last"),
            "it had no gradient in this step",
        ),
        "zeros for None": (
            changed(InTheLesson, on_none="zeros"),
            "it had no gradient in this step",
        ),
        "copies": (changed(InTheLesson, copies=True), "share the memory of the weight"),
        "nothing sent": (changed(InTheLesson, sends=False), "how do they get there?"),
        "by the rank of the world": (
            changed(InTheLesson, by_world_rank=True),
            "with ranks 0, 1, 2 and 3 it is right",
        ),
        "in the world": (
            changed(InTheLesson, in_world=True),
            "with ranks 0, 1, 2 and 3 it is right",
        ),
        "the next rank's rows": (changed(InTheLesson, next_rank=True), "the old ones"),
        "zero_grad forgotten": (changed(InTheLesson, forgets=False), "after zero_grad()"),
        "an optimizer for each weight": (
            changed(InTheLesson, one_each=True),
            "`make` was called 4 times",
        ),
        "no gradients": (changed(InTheLesson, gives_gradients=False), "have no `.grad`"),
        "averaged twice": (changed(InTheLesson, divides=True), "averages already"),
        "gradients of the first step": (GradientsOnce, "are they those of this step?"),
        "no padding": (GathersWithoutPadding, "all_gather"),
        "an all-reduce of the weights": (AddsUp, "what is there to add up?"),
        "one rank sends": (OnlyTheFirstSends, "broadcast"),
        "labcode's own": (ByLabcode, "labcode's own answer"),
    },
)


# ---- 13.3 the average of my rows


def average(
    params,
    rows,
    group,
    *,
    divide_by=None,
    keeps=False,
    adds=False,
    in_world=False,
    shift=0,
    waits=True,
):
    p = group.size()
    longest = sum(piece_of(param, 0, p).numel() for param in params)
    parts = params[0].grad.new_zeros(p, longest)
    for rank in range(p):
        pieces = [piece_of(param.grad, (rank + shift) % p, p).flatten() for param in params]
        flat = torch.cat(pieces)
        parts[rank, : len(flat)] = flat
    mine = torch.empty_like(parts[0])
    chosen = None if in_world else group
    if waits:
        dist.reduce_scatter(mine, list(parts), group=chosen)
    else:
        dist.reduce_scatter(mine, list(parts), group=chosen, async_op=True)
    mine /= p if divide_by is None else divide_by
    first = 0
    for param, row in zip(params, rows):
        mean = mine[first : first + row.numel()].view_as(row)
        first += row.numel()
        row.grad = mean if not adds or row.grad is None else row.grad + mean
        if not keeps:
            param.grad = None


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


def with_a_handle(params, rows, group):
    p = group.size()
    lists = []
    for rank in range(p):
        pieces = []
        for param in params:
            piece = piece_of(param.grad, rank, p)
            missing = piece_of(param, 0, p).numel() - piece.numel()
            pieces.append(F.pad(piece.reshape(-1), (0, missing)))
        lists.append(torch.cat(pieces))
    mine = torch.zeros_like(lists[0])
    work = dist.reduce_scatter(mine, lists, group=group, async_op=True)
    assert work is not None
    work.wait()
    sizes = [piece_of(param, 0, p).numel() for param in params]
    for param, row, part in zip(params, rows, mine.split(sizes)):
        row.grad = (part[: row.numel()] / p).view(row.shape)
        param.grad = None


def all_reduced(params, rows, group):
    for param, row in zip(params, rows):
        dist.all_reduce(param.grad, group=group)
        row.grad = own(param.grad / group.size(), group).clone()
        param.grad = None


def one_for_each(params, rows, group):
    for param, row in zip(params, rows):
        average([param], [row], group)


def flat_chunks(params, rows, group):
    """Cuts the row of all gradients, in place of each weight, into p parts."""
    p = group.size()
    flat = torch.cat([param.grad.flatten() for param in params])
    each = -(-len(flat) // p)
    flat = F.pad(flat, (0, p * each - len(flat)))
    mine = torch.empty(each, dtype=flat.dtype)
    dist.reduce_scatter(mine, list(flat.chunk(p)), group=group)
    mine = F.pad(mine / p, (0, 100))
    first = 0
    for param, row in zip(params, rows):
        row.grad = mine[first : first + row.numel()].view_as(row).clone()
        first += row.numel()
        param.grad = None


def without_padding(params, rows, group):
    p = group.size()
    parts = []
    for rank in range(p):
        parts.append(torch.cat([piece_of(param.grad, rank, p).flatten() for param in params]))
    mine = torch.empty_like(parts[group.rank()])
    dist.reduce_scatter(mine, parts, group=group)
    first = 0
    for param, row in zip(params, rows):
        row.grad = mine[first : first + row.numel()].view_as(row) / p
        first += row.numel()
        param.grad = None


def in_float32(params, rows, group):
    p = group.size()
    longest = sum(piece_of(param, 0, p).numel() for param in params)
    parts = torch.zeros(p, longest)
    for rank in range(p):
        flat = torch.cat([piece_of(param.grad, rank, p).flatten() for param in params])
        parts[rank, : len(flat)] = flat
    mine = torch.empty(longest)
    dist.reduce_scatter(mine, list(parts), group=group)
    first = 0
    for param, row in zip(params, rows):
        row.grad = mine[first : first + row.numel()].view_as(row) / p
        first += row.numel()
        param.grad = None


def nothing_sent(params, rows, group):
    for param, row in zip(params, rows):
        row.grad = own(param.grad, group).clone()
        param.grad = None


def of_weights(params, rows, group):
    for param in params:
        param.grad = param.detach().clone()
    average(params, rows, group)


def padding_unpacked_too(params, rows, group):
    """Unpacks with the sizes of the first rank, on every rank."""
    p = group.size()
    longest = sum(piece_of(param, 0, p).numel() for param in params)
    parts = params[0].grad.new_zeros(p, longest)
    for rank in range(p):
        flat = torch.cat([piece_of(param.grad, rank, p).flatten() for param in params])
        parts[rank, : len(flat)] = flat
    mine = torch.empty_like(parts[0])
    dist.reduce_scatter(mine, list(parts), group=group)
    first = 0
    for param, row in zip(params, rows):
        row.grad = mine[first : first + row.numel()].view_as(row) / p
        first += piece_of(param, 0, p).numel()
        param.grad = None


AVERAGE = Answers(
    check=l13.average_own_rows,
    right={
        "packed": average,
        "each weight padded": padded_weights,
        "a handle": with_a_handle,
        "parts of their own length": without_padding,
    },
    wrong={
        "an all-reduce": (all_reduced, "the sum of its own part only"),
        "one for each weight": (one_for_each, "one message is enough"),
        "a sum": (functools.partial(average, divide_by=1), "4 times as large as the mean"),
        "divided by the world size": (
            functools.partial(average, divide_by=4),
            "0.75 times as large as the mean",
        ),
        "in the world": (functools.partial(average, in_world=True), "with ranks 0, 1, 2 and 3"),
        "gradients kept": (functools.partial(average, keeps=True), "still holds a whole gradient"),
        "added up": (functools.partial(average, adds=True), "it takes its place"),
        "the next rank's rows": (functools.partial(average, shift=1), "of the weight [7, 3]"),
        "cut after joining": (flat_chunks, "right numbers in wrong places"),
        "nobody waits": (functools.partial(average, waits=False), "waited for: "),
        "float32": (in_float32, "dtype 'float'"),
        "nothing sent": (nothing_sent, "did anything travel?"),
        "weights": (of_weights, "of the weight [7, 3]"),
        "unpacked by the first rank's sizes": (
            padding_unpacked_too,
            "on the rank that sends and on the one that receives",
        ),
    },
)


# ---- 13.4 a layer that borrows its weight


class Borrowing(nn.Module):
    """The skeleton of the exercise, and its solution; the mistakes change one thing each."""

    resizes = True
    writes = "data"
    cuts = True
    pads = True
    frees_forward = True
    frees_backward = True
    gathers_backward = True
    keeps_gradient = False
    adds = True
    divide_by = None
    keeps_whole = False
    own_group = True
    asks = True
    waits = True
    bytes_each = None
    holds_parts = False
    product = staticmethod(F.linear)

    def __init__(self, weight, group):
        super().__init__()
        self.group = group
        if not self.own_group:
            self.group = dist.distributed_c10d._get_default_group()
        self.rows = nn.Parameter(own(weight, group).clone())
        self.weight = nn.Parameter(weight.clone())
        self.num_bytes = self.weight.nbytes
        if self.keeps_whole:
            self.whole = weight.clone()
        self.weight.register_post_accumulate_grad_hook(self.gradient_ready)
        self.reshard()

    def reshard(self):
        self.weight.untyped_storage().resize_(0)

    def gather(self):
        p = self.group.size()
        if self.resizes:
            num_bytes = self.num_bytes
            if self.bytes_each is not None:
                num_bytes = self.bytes_each * self.weight.numel()
            self.weight.untyped_storage().resize_(num_bytes)
        each = -(-len(self.weight) // p)
        if not self.pads:
            each = len(self.rows)
        mine = self.rows.new_zeros(each, *self.weight.shape[1:])
        mine[: len(self.rows)] = self.rows.detach()
        parts = [torch.empty_like(mine) for _ in range(p)]
        if self.waits:
            dist.all_gather(parts, mine, group=self.group)
        else:
            dist.all_gather(parts, mine, group=self.group, async_op=True)
        if self.holds_parts:
            self.parts = parts
        whole = torch.cat(parts)
        if self.cuts:
            whole = whole[: len(self.weight)]
        if self.keeps_whole:
            whole = self.whole
        if self.writes == "data":
            self.weight.data.copy_(whole)
        elif self.writes == "detach":
            self.weight.detach().copy_(whole)
        else:
            with torch.no_grad():
                self.weight.copy_(whole)

    def forward(self, x):
        self.gather()
        y = self.product(x, self.weight)
        if self.frees_forward:
            self.reshard()
        if self.gathers_backward and (y.requires_grad or not self.asks):
            y.register_hook(self.before_backward)
        return y

    def before_backward(self, grad):
        self.gather()

    def gradient_ready(self, weight):
        p = self.group.size()
        each = -(-len(weight) // p)
        padded = weight.grad.new_zeros(p * each, *weight.shape[1:])
        padded[: len(weight)] = weight.grad
        mine = torch.empty_like(padded[:each])
        dist.reduce_scatter(mine, list(padded.chunk(p)), group=self.group)
        mine = mine[: len(self.rows)] / (self.divide_by or p)
        if self.rows.grad is None or not self.adds:
            self.rows.grad = mine
        else:
            self.rows.grad += mine
        if not self.keeps_gradient:
            weight.grad = None
        if self.frees_backward:
            self.reshard()


class IntoOneTensor(Borrowing):
    """all_gather_into_tensor and reduce_scatter_tensor, and slices of `data`."""

    def gather(self):
        p = self.group.size()
        each = -(-len(self.weight) // p)
        flat = F.pad(self.rows.data, (0, 0, 0, each - len(self.rows)))
        whole = flat.new_empty(p * each, flat.shape[1])
        dist.all_gather_into_tensor(whole, flat, group=self.group)
        self.weight.untyped_storage().resize_(self.num_bytes)
        self.weight.data[:] = whole[: len(self.weight)]

    def gradient_ready(self, weight):
        p = self.group.size()
        each = -(-len(weight) // p)
        padded = F.pad(weight.grad, (0, 0, 0, p * each - len(weight)))
        weight.grad = None
        self.reshard()
        mine = padded.new_empty(each, padded.shape[1])
        dist.reduce_scatter_tensor(mine, padded / p, group=self.group)
        mine = mine[: len(self.rows)]
        self.rows.grad = mine.clone() if self.rows.grad is None else self.rows.grad + mine


class ByOwnPieces(Borrowing):
    """Remembers whether the weight is whole, and fills it piece by piece."""

    is_whole = False

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
        assert work is not None
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
            y.register_hook(lambda grad: self.before_backward(grad))
        return y


class NewTensor(Borrowing):
    """Puts a new tensor into `weight.data`: autograd holds it until backward."""

    def reshard(self):
        self.weight.data = self.weight.data.new_empty(0)

    def gather(self):
        p = self.group.size()
        rows = 7
        each = -(-rows // p)
        mine = self.rows.new_zeros(each, 6)
        mine[: len(self.rows)] = self.rows.detach()
        parts = [torch.empty_like(mine) for _ in range(p)]
        dist.all_gather(parts, mine, group=self.group)
        self.weight.data = torch.cat(parts)[:rows]


class GathersInCollective(Borrowing):
    """All-reduces the gradient."""

    def gradient_ready(self, weight):
        dist.all_reduce(weight.grad, group=self.group)
        mine = own(weight.grad, self.group) / self.group.size()
        self.rows.grad = mine.clone() if self.rows.grad is None else self.rows.grad + mine
        weight.grad = None
        self.reshard()


class FirstRowsOfTheGradient(Borrowing):
    """Keeps the rows of the next rank."""

    def gradient_ready(self, weight):
        weight.grad = weight.grad.roll(1, 0)
        super().gradient_ready(weight)


class NoReduce(Borrowing):
    def gradient_ready(self, weight):
        mine = own(weight.grad, self.group).clone()
        self.rows.grad = mine if self.rows.grad is None else self.rows.grad + mine
        weight.grad = None
        self.reshard()


class NobodyWaitsInBackward(Borrowing):
    def gradient_ready(self, weight):
        p = self.group.size()
        each = -(-len(weight) // p)
        padded = F.pad(weight.grad, (0, 0, 0, p * each - len(weight)))
        mine = torch.zeros_like(padded[:each])
        dist.reduce_scatter(mine, list(padded.chunk(p)), group=self.group, async_op=True)
        mine = mine[: len(self.rows)] / p
        self.rows.grad = mine if self.rows.grad is None else self.rows.grad + mine
        weight.grad = None
        self.reshard()


class HoldsTheMessage(Borrowing):
    """Keeps what has arrived."""

    def gather(self):
        super().gather()
        self.arrived = self.weight.data.clone()


def mistaken(**mistakes):
    if "product" in mistakes:
        mistakes["product"] = staticmethod(mistakes["product"])
    return type("Mistaken", (Borrowing,), mistakes)


BORROWED = Answers(
    check=l13.borrowing_linear,
    right={
        "as in the lesson": Borrowing,
        "into one tensor": IntoOneTensor,
        "piece by piece": ByOwnPieces,
        "a product with the transpose": mistaken(product=lambda x, weight: x @ weight.T),
    },
    wrong={
        "memory forgotten": (mistaken(resizes=False), "while it had no memory"),
        "written through detach": (mistaken(writes="detach"), "autograd has seen"),
        "written under no_grad": (mistaken(writes="no_grad"), "autograd has seen"),
        "the padding stays": (mistaken(cuts=False), "must match"),
        "no padding": (mistaken(pads=False), "all_gather"),
        "not freed after forward": (
            mistaken(frees_forward=False),
            "after forward the weight still has its memory",
        ),
        "not freed after backward": (
            mistaken(frees_backward=False),
            "after backward the weight still has its memory",
        ),
        "gathered for forward only": (mistaken(gathers_backward=False), "while it had no memory"),
        "the whole gradient kept": (mistaken(keeps_gradient=True), "`weight.grad` still holds"),
        "set": (mistaken(adds=False), "has replaced `rows.grad`"),
        "a sum": (mistaken(divide_by=1), "4 times as large as the mean"),
        "divided by the world size": (mistaken(divide_by=4), "0.75 times as large"),
        "a copy of the whole": (mistaken(keeps_whole=True), "that of the beginning"),
        "in the world": (mistaken(own_group=False), "with ranks 0, 1, 2 and 3 it is right"),
        "no question": (mistaken(asks=False), "cannot register a hook"),
        "a new tensor": (NewTensor, "a weight [7, 6] on 4 ranks"),
        "an all-reduce": (GathersInCollective, "who sums the gradient"),
        "other rows": (FirstRowsOfTheGradient, "which rows of the gradient go to which rank?"),
        "nothing summed": (NoReduce, "who sums the gradient"),
        "holds what has arrived": (HoldsTheMessage, "Who holds them?"),
        "holds the parts": (mistaken(holds_parts=True), "Who holds them?"),
        "a clone": (
            mistaken(product=lambda x, weight: F.linear(x, weight.clone())),
            "Who holds them?",
        ),
        "a sum with zero": (
            mistaken(product=lambda x, weight: F.linear(x, weight + 0.0)),
            "Who holds them?",
        ),
        "a contiguous transpose": (
            mistaken(product=lambda x, weight: x @ weight.T.contiguous()),
            "Who holds them?",
        ),
        "numbers for bytes": (mistaken(bytes_each=1), "in what does the storage count?"),
        "four bytes a number": (mistaken(bytes_each=4), "in what does the storage count?"),
        "nobody waits": (mistaken(waits=False), "waited for: "),
        "nobody waits in backward": (NobodyWaitsInBackward, "waited for: "),
    },
)


# ---- 13.5 a layout


def straight(s, *, units=2, fits=True, hybrid=True, times=3, link="slowest", between=True):
    """Costs of all candidates, and the fastest; the mistakes change one thing each."""
    everyone = s.nodes * s.ranks_per_node
    found = None
    for stage, ranks in candidates(s):
        if not hybrid and ranks < everyone:
            continue
        message = 2 * s.num_parameters
        kept = state_bytes(
            s.num_parameters, stage, ranks, weight_bytes=2, gradient_bytes=2, optimizer_bytes=12
        ).total
        if stage == 3:
            kept += units * message / s.num_layers
        speed = s.inside_bytes_per_s
        if ranks > s.ranks_per_node:
            speed = min(speed, s.between_bytes_per_s) if link == "slowest" else speed
        k = times if stage == 3 else 2
        sending = k * (ranks - 1) / ranks * message / speed
        copies = everyone // ranks
        if copies > 1 and between:
            sending += 2 * (copies - 1) / copies * message / s.between_bytes_per_s
        if fits and kept > s.room_bytes:
            continue
        if found is None or sending < found.sending_s:
            found = Layout(stage, ranks, kept, sending)
    return found


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


def by_rules(s):
    """Tries the candidates in the order that the costs allow."""
    for stage in (2, 1, 0):
        layout = l13_layouts.Layout(stage, s.nodes * s.ranks_per_node, *_costs(s, stage))
        if layout.kept_bytes <= s.room_bytes:
            return layout
    flat = Layout(3, s.nodes * s.ranks_per_node, *_costs(s, 3))
    inside = straight(s._replace(room_bytes=float("inf"), nodes=1, num_layers=s.num_layers))
    assert inside is not None
    g = s.ranks_per_node
    kept = 16 * s.num_parameters / g + 4 * s.num_parameters / s.num_layers
    seconds = 6 * (g - 1) / g * s.num_parameters / s.inside_bytes_per_s
    if s.nodes > 1:
        seconds += 4 * (s.nodes - 1) / s.nodes * s.num_parameters / s.between_bytes_per_s
    if kept <= s.room_bytes and seconds < flat.sending_s:
        return Layout(3, g, kept, seconds)
    return flat


def _costs(s, stage):
    everybody = s._replace(room_bytes=float("inf"))
    p = s.nodes * s.ranks_per_node
    kept = state_bytes(
        s.num_parameters, stage, p, weight_bytes=2, gradient_bytes=2, optimizer_bytes=12
    ).total
    link = s.inside_bytes_per_s
    if everybody.nodes > 1:
        link = min(link, s.between_bytes_per_s)
    if stage == 3:
        kept += 4 * s.num_parameters / s.num_layers
    return kept, (3 if stage == 3 else 2) * 2 * s.num_parameters * (p - 1) / p / link


LAYOUT = Answers(
    check=lambda answer, ranks: l13.choose(answer),
    right={"a loop": straight, "by hand": by_hand, "by rules": by_rules},
    wrong={
        "does not fit": (functools.partial(straight, fits=False), "and there is room for"),
        "the borrowed units forgotten": (
            functools.partial(straight, units=0),
            "and kept_bytes says",
        ),
        "no hybrid": (functools.partial(straight, hybrid=False), "something else that fits"),
        "always stage 3": (
            lambda s: straight(s._replace(room_bytes=0.9 * _costs(s, 2)[0])),
            "something else that fits",
        ),
        "stage 3 sends as little": (functools.partial(straight, times=2), "and sending_s says"),
        "the fast link": (functools.partial(straight, link="inside"), "and sending_s says"),
        "nothing between the copies": (
            functools.partial(straight, between=False),
            "and sending_s says",
        ),
        "a pair": (lambda s: (3, 8), "return Layout(...)"),
        "another stage": (lambda s: Layout(4, 8, 0, 0), "none of the candidates"),
        "the lab's": (l13_layouts.best, "labcode's own answer"),
    },
)


# ---- 13.6 the script: text, as the check reads the source of a function

SCRIPT = solution_of("13", "main")

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


def check_script(source, ranks):
    """`l13_script.script` of a function whose source is given."""
    with tempfile.TemporaryDirectory() as folder:
        l13_script.script(source, folder)


WRITTEN = Answers(
    check=check_script,
    right={
        "the lesson's": SCRIPT,
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
        "the CPU only": (
            with_change('"nccl" if on_gpus else "gloo"', '"gloo"'),
            "with GPUs it would use gloo",
        ),
    },
)


ANSWERS = {
    "13.1": OWN_ROWS,
    "13.2": OPTIMIZER,
    "13.3": AVERAGE,
    "13.4": BORROWED,
    "13.5": LAYOUT,
    "13.6": WRITTEN,
}
