"""Answers to the exercises of lesson 09, tensor parallelism."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from answers import Answers
from torch import nn

from labcode.comm.collectives import copy_to, gather_from, reduce_from
from labcode.parallel import tensor
from labcode.teach.exercises import l09, l09_vocabulary


def everybody() -> dist.ProcessGroup:
    """The default group, which a forgotten `group` comes down to."""
    world = dist.group.WORLD
    assert world is not None
    return world


# ---- 9.1 f and g


def function(forward, backward, gradients=None):
    """An autograd Function of two operations on (tensor, group)."""

    def run_forward(ctx, x, group):
        ctx.group = group
        return forward(x, group)

    def run_backward(ctx, grad):
        result = backward(grad, ctx.group)
        return (result, None) if gradients is None else gradients(result)

    names = {"forward": staticmethod(run_forward), "backward": staticmethod(run_backward)}
    return type("Learners", (torch.autograd.Function,), names)


def same(x, group):
    return x.view_as(x)


def total(x, group):
    x = x.clone()
    dist.all_reduce(x, group=group)
    return x


def total_in_place(x, group):
    dist.all_reduce(x, group=group)
    return x


def total_of_all(x, group):
    """Forgets the group."""
    x = x.clone()
    dist.all_reduce(x)
    return x


def mean(x, group):
    return total(x, group) / group.size()


def total_by_gathering(x, group):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.stack(parts).sum(0)


def total_of_new_tensor(x, group):
    summed = torch.zeros_like(x)
    summed += x
    dist.all_reduce(summed, dist.ReduceOp.SUM, group=group)
    return summed


def detached_copy(x, group):
    return x.detach().clone()


def nothing(x, group):
    return None


def itself(x, group):
    return x


def total_not_awaited(x, group):
    """Starts a sum and hands on what is there."""
    x = x.clone()
    dist.all_reduce(x, group=group, async_op=True)
    return x


def total_awaited(x, group):
    x = x.clone()
    work = dist.all_reduce(x, group=group, async_op=True)
    work.wait()
    return x


def total_by_functional(x, group):
    """A functional collective: its result waits for itself when it is used."""
    import torch.distributed._functional_collectives as functional

    return functional.all_reduce(x, "sum", group)


class CopyToOfTheClass(torch.autograd.Function):
    """Keeps the group where all calls share it."""

    group = None

    @staticmethod
    def forward(ctx, x, group):
        CopyToOfTheClass.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return total(grad, CopyToOfTheClass.group), None


f = function(same, total)
g = function(total, same)


def both_functions(answer, ranks):
    f, g = answer() if callable(answer) else answer
    l09.copy_and_reduce(f, g, ranks)


PAIRS = Answers(
    check=both_functions,
    right={
        "clone and all_reduce": (f, g),
        "all_gather and sum": (
            function(same, total_by_gathering),
            function(total_by_gathering, same),
        ),
        "new tensors": (
            function(detached_copy, total_of_new_tensor),
            function(total_of_new_tensor, detached_copy),
        ),
        "x itself, and awaited": (
            function(itself, total_awaited),
            function(total_awaited, itself),
        ),
        "functional collectives": (
            function(same, total_by_functional),
            function(total_by_functional, same),
        ),
    },
    wrong={
        "f hands on": ((function(same, same), g), "own part"),
        "f sums forward": ((function(total, total), g), "forward is the identity"),
        "f in place": ((function(same, total_in_place), g), "handed"),
        "f averages": ((function(same, mean), g), "backward gives"),
        "f without the group": (
            (function(same, total_of_all), g),
            "runs over 4 ranks, and the group has 2",
        ),
        "g without the group": (
            (f, function(total_of_all, same)),
            "runs over 4 ranks, and the group has 2",
        ),
        "one gradient for two arguments": (
            (function(same, total, lambda grad: grad), g),
            "incorrect number of gradients",
        ),
        "no return in backward": (
            (function(same, total, lambda grad: None), g),
            "is there a `return` in backward",
        ),
        "not awaited": ((f, function(total_not_awaited, same)), "nobody waits"),
        "not awaited in backward": ((function(same, total_not_awaited), g), "nobody waits"),
        "the group on the class": ((CopyToOfTheClass, g), "on the class"),
        "None": ((f, None), "ReduceFrom is None"),
        "g does nothing": ((f, function(same, same)), "forward has to sum"),
        "g sums twice": ((f, function(total, total)), "2 times too long"),
        "g in place": ((f, function(total_in_place, same)), "wrote into its input"),
        "no gradient": (
            (f, function(total, same, lambda grad: (None, None))),
            "no gradient",
        ),
        "f and g exchanged": ((g, f), "forward is the identity"),
        "no return": ((function(nothing, total), g), "returned None"),
        "two results": (
            (f, function(lambda x, group: (total(x, group), group), same)),
            "a tuple of 2",
        ),
        "labcode's own": (
            (f, function(reduce_from, same)),
            "collectives.reduce_from is labcode's own answer",
        ),
    },
)


# ---- 9.2 the column-parallel layer


class Columns(nn.Module):
    """The right layer, with places for mistakes."""

    def __init__(self, layer, group):
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(self.part(layer.weight.detach(), 0).clone())
        self.bias = None
        if layer.bias is not None:
            self.bias = nn.Parameter(self.part(layer.bias.detach(), 0).clone())

    def part(self, whole, dim):
        return whole.chunk(self.group.size(), dim)[self.group.rank()]

    def forward(self, x):
        return F.linear(copy_to(x, self.group), self.weight, self.bias)


class ColumnsBySlices(nn.Module):
    """With arithmetic of its own, torch.empty and copy_, and its own f."""

    def __init__(self, layer, group):
        super().__init__()
        outputs, inputs = layer.weight.shape
        size = outputs // dist.get_world_size(group)
        start = dist.get_rank(group) * size
        self.group = group
        self.weight = nn.Parameter(torch.empty(size, inputs, dtype=layer.weight.dtype))
        with torch.no_grad():
            self.weight.copy_(layer.weight[start : start + size])
        if layer.bias is None:
            self.register_parameter("bias", None)
        else:
            self.bias = nn.Parameter(layer.bias[start : start + size].clone().detach())

    def forward(self, x):
        y = f.apply(x, self.group) @ self.weight.T
        return y if self.bias is None else y + self.bias


class ColumnsWithALinear(nn.Linear):
    """A smaller nn.Linear."""

    def __init__(self, layer, group):
        p, rank = group.size(), group.rank()
        super().__init__(
            layer.in_features,
            layer.out_features // p,
            layer.bias is not None,
            dtype=layer.weight.dtype,
        )
        self.group = group
        self.weight.data.copy_(layer.weight.data.tensor_split(p)[rank])
        if layer.bias is not None:
            self.bias.data.copy_(layer.bias.data.tensor_split(p)[rank])

    def forward(self, x):
        return super().forward(copy_to(x, self.group))


class ColumnsOfTheInputs(Columns):
    def __init__(self, layer, group):
        super().__init__(layer, group)
        self.weight = nn.Parameter(self.part(layer.weight.detach(), 1).clone())


class ColumnsWhole(nn.Module):
    """No sharding at all: the whole layer, of which it hands on its part."""

    def __init__(self, layer, group):
        super().__init__()
        self.layer = layer
        self.group = group

    def forward(self, x):
        y = self.layer(copy_to(x, self.group))
        return y.chunk(self.group.size(), -1)[self.group.rank()]


class ColumnsWithoutF(Columns):
    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


class ColumnsGathered(Columns):
    def forward(self, x):
        return gather_from(super().forward(x), self.group, -1)


class ColumnsAsViews(Columns):
    def __init__(self, layer, group):
        super().__init__(layer, group)
        self.weight = nn.Parameter(self.part(layer.weight.detach(), 0))


class ColumnsOfTheFirst(Columns):
    def part(self, whole, dim):
        return whole.chunk(self.group.size(), dim)[0]


class ColumnsOfTheWorld(Columns):
    """The rank of the job in place of that of the group."""

    def part(self, whole, dim):
        return whole.chunk(self.group.size(), dim)[dist.get_rank() % 4]


class ColumnsDefaultGroup(Columns):
    def forward(self, x):
        return F.linear(copy_to(x, everybody()), self.weight, self.bias)


class ColumnsNoParameters(nn.Module):
    def __init__(self, layer, group):
        super().__init__()
        self.group = group
        self.weight = layer.weight.chunk(group.size())[group.rank()].detach().clone()
        self.bias = None

    def forward(self, x):
        return F.linear(copy_to(x, self.group), self.weight)


class ColumnsWholeBias(Columns):
    def __init__(self, layer, group):
        super().__init__(layer, group)
        if layer.bias is not None:
            self.bias = nn.Parameter(layer.bias.detach().clone())

    def forward(self, x):
        y = copy_to(x, self.group) @ self.weight.T
        if self.bias is None:
            return y
        return y + self.part(self.bias, 0)


class ColumnsNoBias(Columns):
    def forward(self, x):
        return F.linear(copy_to(x, self.group), self.weight)


class ColumnsWithG(Columns):
    """g in place of f: adds up different features."""

    def forward(self, x):
        return reduce_from(F.linear(x, self.weight, self.bias), self.group)


class ColumnsPlainWeight(nn.Module):
    """The weight is no parameter, the bias is."""

    def __init__(self, layer, group):
        super().__init__()
        p, rank = group.size(), group.rank()
        self.group = group
        self.weight = layer.weight.detach().chunk(p)[rank].clone()
        self.bias = None
        if layer.bias is not None:
            self.bias = nn.Parameter(layer.bias.detach().chunk(p)[rank].clone())

    def forward(self, x):
        return F.linear(copy_to(x, self.group), self.weight, self.bias)


class ColumnsInTwo(Columns):
    """Two parts, whatever the size of the group."""

    def part(self, whole, dim):
        return whole.chunk(2, dim)[self.group.rank()]


class ColumnsHoldingTheLayer(Columns):
    """Keeps the whole layer where parameters() does not look."""

    def __init__(self, layer, group):
        super().__init__(layer, group)
        self.hidden = [layer]


class ColumnsPadded(Columns):
    """Computes all outputs, most of them with zeros."""

    def forward(self, x):
        rows = len(self.weight)
        first = self.group.rank() * rows
        parts = [torch.zeros_like(self.weight)] * self.group.size()
        parts[self.group.rank()] = self.weight
        y = (copy_to(x, self.group) @ torch.cat(parts).T)[..., first : first + rows]
        return y if self.bias is None else y + self.bias


class ColumnsInTheInput(Columns):
    """Doubles its input, and halves it again in the copy."""

    def forward(self, x):
        y = super().forward(x)
        x.data.mul_(2)
        return y


class ColumnsCutTheLayer(nn.Module):
    """Cuts up the layer that was handed in, and keeps its parameters."""

    dim = 0

    def __init__(self, layer, group):
        super().__init__()
        p, rank = group.size(), group.rank()
        layer.weight.data = layer.weight.data.chunk(p, self.dim)[rank].clone()
        if layer.bias is not None and self.dim == 0:
            layer.bias.data = layer.bias.data.chunk(p)[rank].clone()
        self.group = group
        self.weight = layer.weight
        self.bias = layer.bias

    def forward(self, x):
        return F.linear(copy_to(x, self.group), self.weight, self.bias)


class ColumnsAndTheirBias(Columns):
    """As Megatron-LM's layer does it: the bias is handed on."""

    def forward(self, x):
        return F.linear(copy_to(x, self.group), self.weight), self.bias


class ColumnsScaled(Columns):
    """With a parameter that nobody asked for."""

    def __init__(self, layer, group):
        super().__init__(layer, group)
        self.scale = nn.Parameter(torch.ones((), dtype=layer.weight.dtype))

    def forward(self, x):
        return super().forward(x) * self.scale


class NoReturn(Columns):
    def forward(self, x):
        F.linear(copy_to(x, self.group), self.weight, self.bias)


COLUMNS = Answers(
    check=l09.column_parallel,
    right={
        "chunk": Columns,
        "slices": ColumnsBySlices,
        "a smaller Linear": ColumnsWithALinear,
        "one more parameter": ColumnsScaled,
    },
    wrong={
        "cuts the inputs": (ColumnsOfTheInputs, "the outputs are shared out"),
        "no sharding": (ColumnsWhole, "is the whole weight"),
        "no f": (ColumnsWithoutF, "nothing travels in backward"),
        "gathers": (ColumnsGathered, "the output is whole"),
        "views": (ColumnsAsViews, "a view of the whole weight"),
        "the first part everywhere": (ColumnsOfTheFirst, "the part of number 0"),
        "the rank of the job": (ColumnsOfTheWorld, "or that in the job"),
        "the default group": (ColumnsDefaultGroup, "runs over 4 ranks, and the group has 2"),
        "a plain weight": (ColumnsPlainWeight, "weight is a tensor and not an nn.Parameter"),
        "in two": (ColumnsInTwo, "into how many parts"),
        "holds the layer": (ColumnsHoldingTheLayer, "still holds the whole weight"),
        "padded with zeros": (ColumnsPadded, "as much as this rank's share"),
        "changes its input": (ColumnsInTheInput, "has changed its input"),
        "no parameters": (ColumnsNoParameters, "not an nn.Parameter"),
        "the whole bias": (ColumnsWholeBias, "to which output features"),
        "no bias": (ColumnsNoBias, "the bias is not added"),
        "g in place of f": (ColumnsWithG, "1 all_reduce in forward"),
        "cuts up the layer": (ColumnsCutTheLayer, "`layer` itself has been changed"),
        "a tuple": (ColumnsAndTheirBias, "it returned a tuple of 2"),
        "no return": (NoReturn, "returned None"),
        "labcode's own": (tensor.ColumnParallelLinear, "labcode's own answer"),
    },
)


# ---- 9.3 the row-parallel layer


class Rows(nn.Module):
    """The right layer, with places for mistakes."""

    def __init__(self, layer, group):
        super().__init__()
        self.group = group
        own = layer.weight.detach().chunk(group.size(), dim=1)[group.rank()]
        self.weight = nn.Parameter(own.clone())
        self.bias = None
        if layer.bias is not None:
            self.bias = nn.Parameter(layer.bias.detach().clone())

    def forward(self, x):
        y = reduce_from(F.linear(x, self.weight), self.group)
        if self.bias is not None:
            y = y + self.bias
        return y


class RowsBySlices(nn.Module):
    def __init__(self, layer, group):
        super().__init__()
        size = layer.in_features // group.size()
        start = group.rank() * size
        self.group = group
        self.weight = nn.Parameter(layer.weight[:, start : start + size].detach().contiguous())
        self.register_parameter("bias", layer.bias)

    def forward(self, x):
        y = g.apply(x @ self.weight.t(), self.group)
        return y + self.bias if self.bias is not None else y


class RowsWithZeros(Rows):
    """Adds zero where there is no bias."""

    def forward(self, x):
        bias = 0 if self.bias is None else self.bias
        return reduce_from(x @ self.weight.T, self.group) + bias


class RowsBiasEarly(Rows):
    def forward(self, x):
        return reduce_from(F.linear(x, self.weight, self.bias), self.group)


class RowsOfTheOutputs(Rows):
    def __init__(self, layer, group):
        super().__init__(layer, group)
        own = layer.weight.detach().chunk(group.size(), dim=0)[group.rank()]
        self.weight = nn.Parameter(own.clone())

    def forward(self, x):
        return F.linear(gather_from(x, self.group, -1), self.weight)


class RowsWithoutG(Rows):
    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


class RowsPlainSum(Rows):
    """dist.all_reduce: right in forward, and no gradient."""

    def forward(self, x):
        y = F.linear(x, self.weight).detach()
        dist.all_reduce(y, group=self.group)
        return y if self.bias is None else y + self.bias


class RowsSumInPlace(Rows):
    """dist.all_reduce on the output itself: autograd does not notice, and the gradient is right."""

    def forward(self, x):
        y = F.linear(x, self.weight)
        dist.all_reduce(y, group=self.group)
        return y if self.bias is None else y + self.bias


class RowsSumOfTheView(Rows):
    def forward(self, x):
        y = F.linear(x, self.weight)
        dist.all_reduce(y.detach(), group=self.group)
        return y if self.bias is None else y + self.bias


class RowsStraightThrough(Rows):
    """g without a Function: the sum as a number that autograd is told of."""

    def forward(self, x):
        y = F.linear(x, self.weight)
        total = y.detach().clone()
        dist.all_reduce(total, group=self.group)
        y = y + (total - y.detach())
        return y if self.bias is None else y + self.bias


class RowsWithF(Rows):
    def forward(self, x):
        y = reduce_from(F.linear(copy_to(x, self.group), self.weight), self.group)
        return y if self.bias is None else y + self.bias


class RowsDefaultGroup(Rows):
    def forward(self, x):
        y = reduce_from(F.linear(x, self.weight), everybody())
        return y if self.bias is None else y + self.bias


class RowsMean(Rows):
    def forward(self, x):
        y = reduce_from(F.linear(x, self.weight), self.group) / self.group.size()
        return y if self.bias is None else y + self.bias


class RowsGathered(nn.Module):
    """No sharding: gathers the input and multiplies with the whole weight."""

    def __init__(self, layer, group):
        super().__init__()
        self.layer = layer
        self.group = group

    def forward(self, x):
        return self.layer(gather_from(x, self.group, -1))


class RowsBiasOfRank0(Rows):
    """Adds the bias on the first rank alone, before the sum: the others have no gradient of it."""

    def forward(self, x):
        y = F.linear(x, self.weight)
        if self.bias is not None and self.group.rank() == 0:
            y = y + self.bias
        return reduce_from(y, self.group)


class RowsCutBias(Rows):
    def __init__(self, layer, group):
        super().__init__(layer, group)
        if layer.bias is not None:
            own = layer.bias.detach().chunk(group.size())[group.rank()]
            self.bias = nn.Parameter(own.clone())

    def forward(self, x):
        return reduce_from(F.linear(x, self.weight), self.group)


class RowsBiasHeldByRank0(Rows):
    """The others have no bias at all."""

    def __init__(self, layer, group):
        super().__init__(layer, group)
        if group.rank() > 0:
            self.bias = None

    def forward(self, x):
        return reduce_from(F.linear(x, self.weight, self.bias), self.group)


class RowsCutTheLayer(ColumnsCutTheLayer):
    dim = 1

    def forward(self, x):
        y = reduce_from(F.linear(x, self.weight), self.group)
        return y if self.bias is None else y + self.bias


class RowsAndTheirBias(Rows):
    def forward(self, x):
        return reduce_from(F.linear(x, self.weight), self.group), self.bias


class RowsByFunctional(Rows):
    """Functional collectives have no backward: the sum as a number that autograd is told of."""

    def forward(self, x):
        y = F.linear(x, self.weight)
        y = y + (total_by_functional(y.detach(), self.group) - y.detach())
        return y if self.bias is None else y + self.bias


class RowsNoReturn(Rows):
    def forward(self, x):
        reduce_from(F.linear(x, self.weight), self.group)


ROWS = Answers(
    check=l09.row_parallel,
    right={
        "chunk": Rows,
        "slices": RowsBySlices,
        "zero for no bias": RowsWithZeros,
        "straight through": RowsStraightThrough,
        "functional": RowsByFunctional,
    },
    wrong={
        "bias before the sum": (RowsBiasEarly, "too large by 1 biases"),
        "cuts the outputs": (RowsOfTheOutputs, "the inputs are shared out"),
        "no g": (RowsWithoutG, "nothing travels in forward"),
        "dist.all_reduce": (RowsPlainSum, "no gradient reaches the input"),
        "the output summed in place": (RowsSumInPlace, "right by accident"),
        "a view summed in place": (RowsSumOfTheView, "right by accident"),
        "None": (None, "MyRowParallelLinear is None"),
        "f as well": (RowsWithF, "1 all_reduce in backward"),
        "the default group": (RowsDefaultGroup, "runs over 4 ranks, and the group has 2"),
        "the mean": (RowsMean, "other values"),
        "no sharding": (RowsGathered, "is the whole weight"),
        "bias on one rank": (RowsBiasOfRank0, "bias gets no gradient"),
        "one rank has the bias": (
            RowsBiasHeldByRank0,
            "the rank with number 1: there is no parameter `bias`",
        ),
        "cuts up the layer": (RowsCutTheLayer, "`layer` itself has been changed"),
        "a tuple": (RowsAndTheirBias, "it returned a tuple of 2"),
        "a part of the bias": (RowsCutBias, "to which output features"),
        "no return": (RowsNoReturn, "returned None"),
    },
)


# ---- 9.4 Llama's MLP


def sum_both_ways(x, group):
    return reduce_from(copy_to(x, group), group)


def swiglu(x, gate, up, down, group):
    p = group.size()
    rank = group.rank()
    x = copy_to(x, group)
    inside = F.silu(x @ gate.chunk(p)[rank].T) * (x @ up.chunk(p)[rank].T)
    return reduce_from(inside @ down.chunk(p, dim=1)[rank].T, group)


def swiglu_with_slices(x, gate, up, down, group):
    size = len(gate) // dist.get_world_size(group)
    own = slice(dist.get_rank(group) * size, (dist.get_rank(group) + 1) * size)
    entered = copy_to(x, group)
    a = F.linear(entered, gate[own])
    b = F.linear(entered, up[own])
    return reduce_from(F.linear(a * torch.sigmoid(a) * b, down[:, own]), group)


def swiglu_fused(x, gate, up, down, group):
    p, rank = group.size(), group.rank()
    both = torch.cat([gate.tensor_split(p)[rank], up.tensor_split(p)[rank]])
    a, b = torch.einsum("th,fh->tf", copy_to(x, group), both).chunk(2, -1)
    part = torch.einsum("tf,hf->th", F.silu(a) * b, down.tensor_split(p, 1)[rank])
    return reduce_from(part, group)


def swiglu_without_f(x, gate, up, down, group):
    return swiglu_of(x, x, gate, up, down, group)


def swiglu_of(x_gate, x_up, gate, up, down, group):
    p = group.size()
    rank = group.rank()
    inside = F.silu(x_gate @ gate.chunk(p)[rank].T) * (x_up @ up.chunk(p)[rank].T)
    return reduce_from(inside @ down.chunk(p, dim=1)[rank].T, group)


def swiglu_f_twice(x, gate, up, down, group):
    return swiglu_of(copy_to(x, group), copy_to(x, group), gate, up, down, group)


def swiglu_f_for_one(x, gate, up, down, group):
    return swiglu_of(copy_to(x, group), x, gate, up, down, group)


def swiglu_without_g(x, gate, up, down, group):
    p, rank = group.size(), group.rank()
    x = copy_to(x, group)
    inside = F.silu(x @ gate.chunk(p)[rank].T) * (x @ up.chunk(p)[rank].T)
    return inside @ down.chunk(p, dim=1)[rank].T


def swiglu_whole(x, gate, up, down, group):
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def swiglu_whole_divided(x, gate, up, down, group):
    """No tensor parallelism: everything on every rank, divided by p and added up."""
    y = swiglu_whole(copy_to(x, group), gate, up, down, group) / group.size()
    return reduce_from(y, group)


def swiglu_only_down_cut(x, gate, up, down, group):
    """gate and up whole on every rank."""
    p, rank = group.size(), group.rank()
    x = copy_to(x, group)
    inside = F.silu(x @ gate.T) * (x @ up.T)
    own = inside.chunk(p, -1)[rank]
    return reduce_from(own @ down.chunk(p, dim=1)[rank].T, group)


def swiglu_default_group(x, gate, up, down, group):
    return swiglu(x, gate, up, down, everybody())


def swiglu_default_sums(x, gate, up, down, group):
    p, rank = group.size(), group.rank()
    x = copy_to(x, everybody())
    inside = F.silu(x @ gate.chunk(p)[rank].T) * (x @ up.chunk(p)[rank].T)
    return reduce_from(inside @ down.chunk(p, dim=1)[rank].T, everybody())


def swiglu_other_columns(x, gate, up, down, group):
    """The columns of down from the other end."""
    p, rank = group.size(), group.rank()
    x = copy_to(x, group)
    inside = F.silu(x @ gate.chunk(p)[rank].T) * (x @ up.chunk(p)[rank].T)
    return reduce_from(inside @ down.chunk(p, dim=1)[p - 1 - rank].T, group)


def swiglu_of_detached_weights(x, gate, up, down, group):
    return swiglu(x, gate.detach(), up.detach(), down.detach(), group)


def swiglu_of_copies(x, gate, up, down, group):
    """Parameters of its own: what was handed in gets no gradient."""
    p, rank = group.size(), group.rank()
    own_up = nn.Parameter(up.chunk(p)[rank])
    x = copy_to(x, group)
    inside = F.silu(x @ gate.chunk(p)[rank].T) * (x @ own_up.T)
    return reduce_from(inside @ down.chunk(p, dim=1)[rank].T, group)


def swiglu_of_up(x, gate, up, down, group):
    """silu on the wrong one."""
    return swiglu(x, up, gate, down, group)


def swiglu_with(inside_of):
    """Another formula between the products: `inside_of(gate(x), up(x))`."""

    def answer(x, gate, up, down, group):
        p, rank = group.size(), group.rank()
        x = copy_to(x, group)
        inside = inside_of(x @ gate.chunk(p)[rank].T, x @ up.chunk(p)[rank].T)
        return reduce_from(inside @ down.chunk(p, dim=1)[rank].T, group)

    return answer


def swiglu_summed_both_ways(x, gate, up, down, group):
    p, rank = group.size(), group.rank()
    x = copy_to(x, group)
    inside = F.silu(x @ gate.chunk(p)[rank].T) * (x @ up.chunk(p)[rank].T)
    return sum_both_ways(inside @ down.chunk(p, dim=1)[rank].T, group)


def swiglu_in_place(x, gate, up, down, group):
    """Cuts up the weights that were handed in."""
    p, rank = group.size(), group.rank()
    gate.data = gate.data.chunk(p)[rank]
    up.data = up.data.chunk(p)[rank]
    down.data = down.data.chunk(p, dim=1)[rank]
    x = copy_to(x, group)
    return reduce_from((F.silu(x @ gate.T) * (x @ up.T)) @ down.T, group)


def swiglu_summed_in_place(x, gate, up, down, group):
    p, rank = group.size(), group.rank()
    x = copy_to(x, group)
    inside = F.silu(x @ gate.chunk(p)[rank].T) * (x @ up.chunk(p)[rank].T)
    y = inside @ down.chunk(p, dim=1)[rank].T
    dist.all_reduce(y.detach(), group=group)
    return y


SWIGLU = Answers(
    check=l09.swiglu,
    right={"chunk": swiglu, "slices": swiglu_with_slices, "fused": swiglu_fused},
    wrong={
        "f forgotten": (swiglu_without_f, "gradient of x is not"),
        "f twice": (swiglu_f_twice, "where does x enter"),
        "f for one of two": (swiglu_f_for_one, "gradient of x is not"),
        "g forgotten": (swiglu_without_g, "nothing travels forward"),
        "whole everywhere": (swiglu_whole, "nothing travels forward"),
        "whole, divided by p": (swiglu_whole_divided, "computed whole"),
        "only down is cut": (swiglu_only_down_cut, "computed whole"),
        "the default group": (swiglu_default_group, "runs over 4 ranks, and the group has 2"),
        "sums over all": (swiglu_default_sums, "runs over 4 ranks, and the group has 2"),
        "other columns of down": (swiglu_other_columns, "fit together"),
        "detached weights": (swiglu_of_detached_weights, "gate gets no gradient"),
        "a parameter of its own": (swiglu_of_copies, "up gets no gradient"),
        "silu on up": (swiglu_of_up, "to which of them does silu belong"),
        "silu of the product": (
            swiglu_with(lambda gate, up: F.silu(gate * up)),
            "of what is silu taken",
        ),
        "silu of both": (
            swiglu_with(lambda gate, up: F.silu(gate) * F.silu(up)),
            "of what is silu taken",
        ),
        "no silu": (swiglu_with(lambda gate, up: gate * up), "of what is silu taken"),
        "a sum both ways": (swiglu_summed_both_ways, "every gradient is 2 times too long"),
        "cuts up the weights": (swiglu_in_place, "the call has changed gate and up and down"),
        "a tuple": (lambda *args: (swiglu(*args), None), "it returned a tuple of 2"),
        "summed in place": (swiglu_summed_in_place, "right by accident"),
    },
)


# ---- 9.5 the embedding


class Table(nn.Module):
    """The right embedding, with places for mistakes."""

    def __init__(self, embedding, group):
        super().__init__()
        self.group = group
        parts = embedding.weight.detach().tensor_split(group.size())
        self.weight = nn.Parameter(parts[group.rank()].clone())
        self.first = sum(len(part) for part in parts[: group.rank()])

    def own(self, tokens):
        row = tokens - self.first
        elsewhere = (row < 0) | (row >= len(self.weight))
        x = F.embedding(row.masked_fill(elsewhere, 0), self.weight)
        return x.masked_fill(elsewhere[..., None], 0)

    def forward(self, tokens):
        return reduce_from(self.own(tokens), self.group)


class TableByOneHot(Table):
    """A beginner's lookup: a product with 0 and 1."""

    def own(self, tokens):
        numbers = torch.arange(self.first, self.first + len(self.weight))
        return (tokens[..., None] == numbers).to(self.weight.dtype) @ self.weight


class TableWithZeros(Table):
    """Fills a tensor of zeros where it has the token."""

    def own(self, tokens):
        here = (tokens >= self.first) & (tokens < self.first + len(self.weight))
        x = torch.zeros(*tokens.shape, self.weight.shape[1], dtype=self.weight.dtype)
        x[here] = self.weight[tokens[here] - self.first]
        return x


class TableClamped(Table):
    def own(self, tokens):
        row = (tokens - self.first).clamp(0, len(self.weight) - 1)
        here = (tokens >= self.first) & (tokens < self.first + len(self.weight))
        return self.weight[row] * here.unsqueeze(-1)


class TableNotMasked(Table):
    def own(self, tokens):
        row = (tokens - self.first).clamp(0, len(self.weight) - 1)
        return self.weight[row]


class TableNotShifted(Table):
    def own(self, tokens):
        return F.embedding(tokens, self.weight)


class TableWhole(nn.Module):
    def __init__(self, embedding, group):
        super().__init__()
        self.weight = nn.Parameter(embedding.weight.detach().clone())

    def forward(self, tokens):
        return F.embedding(tokens, self.weight)


class TableWithoutG(Table):
    def forward(self, tokens):
        return self.own(tokens)


class TablePlainSum(Table):
    def forward(self, tokens):
        x = self.own(tokens).detach()
        dist.all_reduce(x, group=self.group)
        return x


class TableDefaultGroup(Table):
    def forward(self, tokens):
        return reduce_from(self.own(tokens), everybody())


class TableView(Table):
    def __init__(self, embedding, group):
        super().__init__(embedding, group)
        self.weight = nn.Parameter(
            embedding.weight.detach().tensor_split(group.size())[group.rank()]
        )


class TableMaskedTooEarly(Table):
    """Masks the row number, and not the vector: the tokens of others add row 0."""

    def own(self, tokens):
        row = tokens - self.first
        elsewhere = (row < 0) | (row >= len(self.weight))
        return F.embedding(row.masked_fill(elsewhere, 0), self.weight)


class TableOneOff(Table):
    def own(self, tokens):
        row = tokens - self.first
        elsewhere = (row < 0) | (row > len(self.weight))
        x = F.embedding(row.masked_fill(elsewhere, 0), self.weight)
        return x.masked_fill(elsewhere[..., None], 0)


class TableOfEqualParts(Table):
    """As if all ranks had as many rows as this one."""

    def __init__(self, embedding, group):
        super().__init__(embedding, group)
        self.first = group.rank() * len(self.weight)


class TableIntoTheTokens(Table):
    def forward(self, tokens):
        tokens -= self.first
        here = (tokens >= 0) & (tokens < len(self.weight))
        x = F.embedding(tokens * here, self.weight) * here[..., None]
        return reduce_from(x, self.group)


class TableSummedInPlace(Table):
    def forward(self, tokens):
        x = self.own(tokens)
        dist.all_reduce(x.detach(), group=self.group)
        return x


class TableWithF(Table):
    def forward(self, tokens):
        return copy_to(self.own(tokens), self.group)


class TableBesideTheWhole(Table):
    """`self.embedding = embedding`: one parameter too many."""

    def __init__(self, embedding, group):
        super().__init__(embedding, group)
        self.embedding = embedding


class TableHoldingTheWhole(Table):
    def __init__(self, embedding, group):
        super().__init__(embedding, group)
        self.kept = [embedding.weight]


class TableHoldingTheParts(Table):
    """The parts are views of the whole."""

    def __init__(self, embedding, group):
        super().__init__(embedding, group)
        self.parts = embedding.weight.tensor_split(group.size())


class TableCutInPlace(Table):
    """Cuts up the embedding that was handed in."""

    def __init__(self, embedding, group):
        super().__init__(embedding, group)
        embedding.weight.data = self.weight.data
        self.weight = embedding.weight


class TableInATuple(Table):
    def forward(self, tokens):
        return super().forward(tokens), tokens


class TableOneRowTooMany(Table):
    """Counts the first token of the next rank as its own."""

    def own(self, tokens):
        row = tokens - self.first
        here = (row >= 0) & (row <= len(self.weight))
        return self.weight[row.clamp(0, len(self.weight) - 1)] * here[..., None]


EMBEDDING = Answers(
    check=l09.vocabulary_embedding,
    right={
        "masked": Table,
        "one-hot": TableByOneHot,
        "zeros": TableWithZeros,
        "clamped": TableClamped,
    },
    wrong={
        "not masked": (TableNotMasked, "What does each rank add to the sum?"),
        "masked before the lookup only": (
            TableMaskedTooEarly,
            "What does each rank add to the sum?",
        ),
        "not shifted": (TableNotShifted, "a token that it does not have"),
        "one row too many": (TableOneOff, "a token that it does not have"),
        "one row too many, clamped": (TableOneRowTooMany, "the vector of token 42 is wrong"),
        "the whole table": (TableWhole, "weight is the whole table"),
        "the whole table as well": (
            TableBesideTheWhole,
            "embedding.weight is the whole table",
        ),
        "holds the table": (TableHoldingTheWhole, "still holds the whole table"),
        "holds its parts": (TableHoldingTheParts, "still holds the whole table"),
        "cuts up the table": (TableCutInPlace, "`embedding` itself has been changed"),
        "a tuple": (TableInATuple, "it returned a tuple of 2"),
        "no g": (TableWithoutG, "who has the vectors of the other tokens"),
        "dist.all_reduce": (TablePlainSum, "weight gets no gradient"),
        "the default group": (TableDefaultGroup, "runs over 4 ranks, and the group has 2"),
        "a view": (TableView, "a view of the whole table"),
        "equal parts": (TableOfEqualParts, "What does each rank add to the sum?"),
        "into the tokens": (TableIntoTheTokens, "has changed `tokens`"),
        "summed in place": (TableSummedInPlace, "right by accident"),
        "f in place of g": (TableWithF, "the vector of token"),
    },
)


# ---- 9.6 the loss


def own_loss(logits, targets, first, group, peak="max", masked=True, sums=reduce_from):
    highest = logits.detach().amax(-1)
    if peak == "max":
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    if peak == "of all tokens":
        highest = highest.amax().expand(len(highest)).contiguous()
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    if peak == "none":
        highest = torch.zeros_like(highest)
    shifted = logits - highest[:, None]
    column = targets - first
    elsewhere = (column < 0) | (column >= logits.shape[-1])
    target = shifted.gather(-1, column.clamp(0, logits.shape[-1] - 1)[:, None])[:, 0]
    if masked:
        target = target.masked_fill(elsewhere, 0)
    both = sums(torch.stack((shifted.exp().sum(-1), target)), group)
    return both[0].log() - both[1]


def loss_in_two_sums(logits, targets, first, group):
    peak = logits.detach().max(dim=-1).values
    dist.all_reduce(peak, dist.ReduceOp.MAX, group)
    exps = (logits - peak.unsqueeze(-1)).exp()
    denominator = reduce_from(exps.sum(-1), group)
    numbers = torch.arange(first, first + logits.shape[-1])
    is_target = targets[:, None] == numbers
    target = reduce_from((logits * is_target).sum(-1), group)
    return denominator.log() + peak - target


def loss_with_logsumexp(logits, targets, first, group):
    """Combines the ranks' own logsumexp; the target by index."""
    own = torch.logsumexp(logits, -1)
    peak = own.detach().clone()
    dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
    whole = peak + reduce_from((own - peak).exp(), group).log()
    here = (targets >= first) & (targets < first + logits.shape[-1])
    target = torch.zeros_like(whole)
    rows = torch.nonzero(here)[:, 0]
    target = target.index_put((rows,), logits[rows, targets[rows] - first])
    return whole - reduce_from(target, group)


def gathered(logits, targets, first, group):
    longest = torch.full(
        (len(targets), -(-l09_vocabulary.VOCAB // group.size())), -torch.inf, dtype=logits.dtype
    )
    longest[:, : logits.shape[-1]] = logits.detach()
    parts = [torch.empty_like(longest) for _ in range(group.size())]
    dist.all_gather(parts, longest, group=group)
    whole = torch.cat([part[:, part.isfinite().any(0)] for part in parts], -1)
    return F.cross_entropy(whole, targets, reduction="none")


def in_place(logits, targets, first, group):
    loss = own_loss(logits, targets, first, group)
    logits.data.exp_()
    return loss


def plain_total(x, group):
    x = x.detach().clone()
    dist.all_reduce(x, group=group)
    return x


def loss_default_group(logits, targets, first, group):
    return own_loss(logits, targets, first, everybody())


def loss_without_shift(logits, targets, first, group):
    return own_loss(logits, targets, 0, group)


def loss_into_the_targets(logits, targets, first, group):
    loss = own_loss(logits, targets, first, group)
    targets -= first
    return loss


def loss_summed_in_place(logits, targets, first, group):
    """Sums behind the back of autograd."""
    peak = logits.detach().amax(-1)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
    shifted = logits - peak[:, None]
    column = targets - first
    elsewhere = (column < 0) | (column >= logits.shape[-1])
    target = shifted.gather(-1, column.clamp(0, logits.shape[-1] - 1)[:, None])[:, 0]
    target = target.masked_fill(elsewhere, 0)
    own_sum = shifted.exp().sum(-1)
    dist.all_reduce(own_sum.detach(), group=group)
    dist.all_reduce(target.detach(), group=group)
    return own_sum.log() - target


def loss_with_one_column_too_many(logits, targets, first, group):
    """Counts the first column of the next rank as its own."""
    peak = logits.detach().max(dim=-1).values
    dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
    shifted = logits - peak[:, None]
    column = targets - first
    mine = (column >= 0) & (column <= logits.shape[-1])
    picked = shifted.gather(-1, column.clamp(0, logits.shape[-1] - 1)[:, None])[:, 0] * mine
    denominator, target = reduce_from(torch.stack([shifted.exp().sum(-1), picked]), group)
    return denominator.log() - target


def loss_with_one_column_too_few(logits, targets, first, group):
    """Takes the last column before its own."""
    peak = logits.detach().max(dim=-1).values
    dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
    shifted = logits - peak[:, None]
    column = targets - first
    mine = (targets >= first - 1) & (column < logits.shape[-1])
    picked = shifted.gather(-1, column.clamp(0, logits.shape[-1] - 1)[:, None])[:, 0] * mine
    denominator, target = reduce_from(torch.stack([shifted.exp().sum(-1), picked]), group)
    return denominator.log() - target


def loss_of_unshifted_target(logits, targets, first, group):
    """The maximum is subtracted in the sum alone."""
    peak = logits.detach().max(dim=-1).values
    dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
    return own_loss(logits, targets, first, group) - peak


def loss_of_unshifted_sum(logits, targets, first, group):
    """The maximum is subtracted from the target alone."""
    peak = logits.detach().max(dim=-1).values
    dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
    return own_loss(logits, targets, first, group) + peak


LOSS = Answers(
    check=l09.vocabulary_loss,
    right={
        "one message": own_loss,
        "two sums": loss_in_two_sums,
        "logsumexp": loss_with_logsumexp,
    },
    wrong={
        "the mean": (lambda *args: own_loss(*args).mean(), "one loss for each"),
        "no maximum": (
            lambda *args: own_loss(*args, peak="none"),
            "before you take the exponential",
        ),
        "one maximum for all tokens": (
            lambda *args: own_loss(*args, peak="of all tokens"),
            "of which logits",
        ),
        "into the targets": (loss_into_the_targets, "`targets` have been changed"),
        "summed in place": (loss_summed_in_place, "right by accident"),
        "its own maximum": (lambda *args: own_loss(*args, peak="own"), "agree on one"),
        "nothing summed": (
            lambda *args: own_loss(*args, sums=lambda x, group: x),
            "who has the logit of the target",
        ),
        "not masked": (
            lambda *args: own_loss(*args, masked=False),
            "who has the logit of the target",
        ),
        "one column too many": (loss_with_one_column_too_many, "(target 42)"),
        "one column too few": (loss_with_one_column_too_few, "(target 41)"),
        "the sign": (lambda *args: -own_loss(*args), "every loss has the wrong sign"),
        "the maximum in the sum alone": (
            loss_of_unshifted_target,
            "in which terms of the formula does m stand",
        ),
        "the maximum from the target alone": (
            loss_of_unshifted_sum,
            "in which terms of the formula does m stand",
        ),
        "a tuple": (lambda *args: (own_loss(*args), None), "it returned a tuple of 2"),
        "first forgotten": (loss_without_shift, "who has the logit of the target"),
        "gathered": (gathered, "three are enough"),
        "in place": (in_place, "changed in place"),
        "dist.all_reduce": (
            lambda *args: own_loss(*args, sums=plain_total),
            "no gradient reaches the logits",
        ),
        "sums in backward too": (
            lambda *args: own_loss(*args, sums=sum_both_ways),
            "nothing has to travel there",
        ),
        "the default group": (loss_default_group, "runs over 4 ranks, and the group has 2"),
    },
)


ANSWERS = {
    "9.1": PAIRS,
    "9.2": COLUMNS,
    "9.3": ROWS,
    "9.4": SWIGLU,
    "9.5": EMBEDDING,
    "9.6": LOSS,
}
