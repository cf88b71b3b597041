"""Answers to the exercises of lesson 09, tensor parallelism."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from answers import Answers, changed
from torch import nn

from labcode.comm.collectives import copy_to, reduce_from
from labcode.parallel import tensor

# ---- 9.1 f and g

SUM = "dist.all_reduce(total, group=group)"  # of g, in forward
SUM_BACKWARD = "dist.all_reduce(total, group=ctx.group)"  # of f
GATHER = """\
parts = [torch.empty_like(total) for _ in range({0}.size())]
        dist.all_gather(parts, total, group={0})
        total = torch.stack(parts).sum(0)"""
FUNCTIONAL = """\
import torch.distributed._functional_collectives as funcol
        total = funcol.all_reduce(total, "sum", {})"""

PAIRS = Answers(
    solves=("CopyTo", "ReduceFrom"),
    right={
        "all_gather and sum": changed(
            f"{SUM} => {GATHER.format('group')}",
            f"{SUM_BACKWARD} => {GATHER.format('ctx.group')}",
        ),
        "new tensors": changed(
            "return x => return x.detach().clone()",
            "x.clone() => torch.zeros_like(x)",
            f"{SUM} => total += x\n        {SUM}",
            "return grad, None => return grad.clone(), None",
        ),
        "x itself, and awaited": changed(
            "total, group=group) => total, group=group, async_op=True).wait()",
            "total, group=ctx.group) => total, group=ctx.group, async_op=True).wait()",
        ),
        "functional collectives": changed(
            f"{SUM} => {FUNCTIONAL.format('group')}",
            f"{SUM_BACKWARD} => {FUNCTIONAL.format('ctx.group')}",
        ),
    },
    wrong={
        "f hands on": (changed("return total, None => return grad, None"), "own part"),
        "f sums forward": (
            changed(f"        return x =>         total = x.clone(); {SUM}; return total"),
            "forward is the identity",
        ),
        "f in place": (changed("grad.clone() => grad"), "handed"),
        "f averages": (
            changed("return total, None => return total / ctx.group.size(), None"),
            "backward gives",
        ),
        "f without the group": (
            changed("total, group=ctx.group => total"),
            "ranks 1-3 wait in all_reduce",
        ),
        "g without the group": (
            changed("total, group=group => total"),
            "ranks 1-3 wait in all_reduce",
        ),
        "one gradient for two arguments": (
            changed("return total, None => return total"),
            "backward gives 1 where 2 are expected",
        ),
        "no return in backward": (changed("return total, None => pass"), "is there a `return`"),
        "not awaited": (
            changed("total, group=group => total, group=group, async_op=True"),
            "without wait() nobody",
        ),
        "not awaited in backward": (
            changed("total, group=ctx.group => total, group=ctx.group, async_op=True"),
            "without wait() nobody",
        ),
        "the group on the class": (changed("ctx.group => CopyTo.group"), "what is on the class"),
        "g does nothing": (changed(f"{SUM} => pass"), "forward has to sum"),
        "g sums twice": (
            changed(
                "x.clone() => x.clone(); ctx.group = group",
                f"return grad, None => total = grad.clone(); {SUM_BACKWARD}; return total, None",
            ),
            "4 times too long",
        ),
        "g in place": (changed("x.clone() => x"), "wrote into its input"),
        "no gradient": (changed("return grad, None => return None, None"), "no gradient"),
        "f and g exchanged": (
            changed(
                "class CopyTo => class Other",
                "class ReduceFrom => class CopyTo",
                "class Other => class ReduceFrom",
            ),
            "forward is the identity",
        ),
        "no return": (changed("return x => pass"), "returned None"),
        "two results": (
            changed("return total\n => return total, group\n"),
            "it returned a tuple",
        ),
        "labcode's own": (
            changed("total = x.clone() => return reduce_from(x, group)"),
            "collectives.reduce_from is labcode's own answer",
        ),
    },
)


# ---- 9.2 the column-parallel layer


class ColumnsBySlices(nn.Module):
    """With arithmetic of its own, torch.empty and copy_."""

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
        y = copy_to(x, self.group) @ self.weight.T
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


WEIGHT = "self.weight = nn.Parameter(own_weight)"
PRODUCT = "F.linear(x, self.weight, self.bias)"
ENTER = "x = copy_to(x, self.group)"
PADDED = """\
rows = len(self.weight)
        first = self.group.rank() * rows
        rest = rows * (self.group.size() - 1) - first
        y = (x @ F.pad(self.weight, (0, 0, first, rest)).T)[..., first : first + rows]
        return y if self.bias is None else y + self.bias"""

COLUMNS = Answers(
    solves="MyColumnParallelLinear",
    right={
        "slices": ColumnsBySlices,
        "a smaller Linear": ColumnsWithALinear,
        "their own f": changed("copy_to(x => CopyTo.apply(x"),
        "one more parameter": changed(
            f"{WEIGHT} => {WEIGHT}; self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))",
            f"return {PRODUCT} => return {PRODUCT} * self.scale",
        ),
    },
    wrong={
        "cuts the inputs": (changed("dim=0 => dim=1"), "the outputs are shared out"),
        "no sharding": (
            changed("chunk(p, dim=0)[rank].clone() => clone()"),
            "is the whole weight",
        ),
        "no f": (changed(f"{ENTER} => pass"), "nothing travels in backward"),
        "gathers": (
            changed(
                f"return {PRODUCT} => from labcode.comm.collectives import gather_from\n"
                f"        return gather_from({PRODUCT}, self.group, -1)"
            ),
            "leaves each rank its own output features",
        ),
        "views": (changed("[rank].clone() => [rank]"), "weight is a view of the whole tensor"),
        "the first part everywhere": (
            changed("[rank].clone() => [0].clone()"),
            "the part of number 0",
        ),
        "the rank of the job": (changed("group.rank() => dist.get_rank()"), "a rank of the world"),
        "the default group": (
            changed("copy_to(x, self.group) => copy_to(x, dist.group.WORLD)"),
            "ranks 1-3 wait in all_reduce",
        ),
        "a plain weight": (
            changed("nn.Parameter(own_weight) => own_weight"),
            "weight is a tensor and not an nn.Parameter",
        ),
        "in two": (changed("p = group.size() => p = 2"), "the outputs are shared out"),
        "holds the layer": (
            changed(f"{WEIGHT} => {WEIGHT}; self.hidden = [layer]"),
            "still holds the whole weight",
        ),
        "padded with zeros": (
            changed(f"return {PRODUCT} => {PADDED}"),
            "as much as this rank's share",
        ),
        "changes its input": (
            changed(f"return {PRODUCT} => y = {PRODUCT}; x.data.mul_(2); return y"),
            "the call has changed x",
        ),
        "the whole bias": (
            changed("layer.bias.detach().chunk(p)[rank] => layer.bias.detach()"),
            "to which output features",
        ),
        "no bias": (changed(f"{PRODUCT} => F.linear(x, self.weight)"), "the bias is not added"),
        "g in place of f": (
            changed(f"{ENTER} => pass", f"{PRODUCT} => reduce_from({PRODUCT}, self.group)"),
            "1 all_reduce in forward",
        ),
        "cuts up the layer": (
            changed(f"{WEIGHT} => layer.weight.data = own_weight; self.weight = layer.weight"),
            "itself has been changed",
        ),
        "a tuple": (
            changed(f"{PRODUCT} => F.linear(x, self.weight), self.bias"),
            "it returned a tuple",
        ),
        "no return": (changed(f"return {PRODUCT} => {PRODUCT}"), "returned None"),
        "labcode's own": (tensor.ColumnParallelLinear, "labcode's own answer"),
    },
)


# ---- 9.3 the row-parallel layer


class RowsBySlices(nn.Module):
    def __init__(self, layer, group):
        super().__init__()
        size = layer.in_features // group.size()
        start = group.rank() * size
        self.group = group
        self.weight = nn.Parameter(layer.weight[:, start : start + size].detach().contiguous())
        self.register_parameter("bias", layer.bias)

    def forward(self, x):
        y = reduce_from(x @ self.weight.t(), self.group)
        return y + self.bias if self.bias is not None else y


LEAVE = "y = reduce_from(term, self.group)"
ADD_BIAS = "y = y + self.bias"
STRAIGHT_THROUGH = """\
total = term.detach().clone()
        dist.all_reduce(total, group=self.group)
        y = term + (total - term.detach())"""
FUNCTIONAL_SUM = """\
import torch.distributed._functional_collectives as funcol
        y = term + (funcol.all_reduce(term.detach(), "sum", self.group) - term.detach())"""
BIAS_OF_RANK_0 = """\
if self.bias is not None and self.group.rank() == 0:
            term = term + self.bias
        """

ROWS = Answers(
    solves="MyRowParallelLinear",
    right={
        "slices": RowsBySlices,
        "their own g": changed("reduce_from(term => ReduceFrom.apply(term"),
        "zero for no bias": changed(
            "if self.bias is not None: => bias = 0 if self.bias is None else self.bias",
            f"    {ADD_BIAS} => y = y + bias",
        ),
        "straight through": changed(f"{LEAVE} => {STRAIGHT_THROUGH}"),
        "functional": changed(f"{LEAVE} => {FUNCTIONAL_SUM}"),
    },
    wrong={
        "bias before the sum": (
            changed("(x, self.weight) => (x, self.weight, self.bias)", f"{ADD_BIAS} => pass"),
            "too large by 3 biases",
        ),
        "cuts the outputs": (changed("dim=1 => dim=0"), "the inputs are shared out"),
        "no g": (changed(f"{LEAVE} => y = term"), "nothing travels in forward"),
        "dist.all_reduce": (
            changed(f"{LEAVE} => y = term.detach(); dist.all_reduce(y, group=self.group)"),
            "no gradient reaches the input",
        ),
        "the output summed in place": (
            changed(f"{LEAVE} => dist.all_reduce(term, group=self.group); y = term"),
            "right by accident",
        ),
        "a view summed in place": (
            changed(f"{LEAVE} => dist.all_reduce(term.detach(), group=self.group); y = term"),
            "right by accident",
        ),
        "f as well": (
            changed("F.linear(x => F.linear(copy_to(x, self.group)"),
            "1 all_reduce in backward",
        ),
        "the default group": (
            changed("(term, self.group) => (term, dist.group.WORLD)"),
            "ranks 1-3 wait in all_reduce",
        ),
        "the mean": (changed(f"{LEAVE} => {LEAVE} / self.group.size()"), "other values"),
        "no sharding": (
            changed("chunk(p, dim=1)[rank].clone() => clone()"),
            "is the whole weight",
        ),
        "bias on one rank": (
            changed(f"{LEAVE} => {BIAS_OF_RANK_0}{LEAVE}", f"{ADD_BIAS} => pass"),
            "bias gets no gradient",
        ),
        "one rank has the bias": (
            changed("layer.bias is not None: => layer.bias is not None and rank == 0:"),
            "on rank 1: there is no parameter `bias`",
        ),
        "cuts up the layer": (
            changed(f"{WEIGHT} => layer.weight.data = own_weight; self.weight = layer.weight"),
            "itself has been changed",
        ),
        "a tuple": (changed("return y => return y, self.bias"), "it returned a tuple"),
        "a part of the bias": (
            changed("layer.bias.detach() => layer.bias.detach().chunk(p)[rank]"),
            "to which output features",
        ),
        "no return": (changed("return y => pass"), "returned None"),
    },
)


# ---- 9.4 Llama's MLP


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


P = "p = group.size()"
ENTER_BOTH = "x = copy_to(x, group)"
INSIDE = "F.silu(x @ own_gate.T) * (x @ own_up.T)"
WHOLE = "(F.silu(x @ gate.T) * (x @ up.T)) @ down.T"
RETURN = "return reduce_from(inside @ own_down.T, group)"

SWIGLU = Answers(
    solves="my_swiglu",
    right={"slices": swiglu_with_slices, "fused": swiglu_fused},
    wrong={
        "f forgotten": (changed(f"{ENTER_BOTH} => pass"), "gradient of x is not"),
        "f twice": (
            changed(f"{ENTER_BOTH} => pass", "x @ => copy_to(x, group) @"),
            "where does x enter",
        ),
        "f for one of two": (
            changed(f"{ENTER_BOTH} => pass", "x @ own_gate => copy_to(x, group) @ own_gate"),
            "gradient of x is not",
        ),
        "g forgotten": (changed(f"{RETURN} => return inside @ own_down.T"), "nothing travels"),
        "whole everywhere": (changed(f"{P} => return {WHOLE}"), "nothing travels forward"),
        "whole, divided by p": (
            changed(f"{P} => {P}; {ENTER_BOTH}; return reduce_from({WHOLE} / p, group)"),
            "computed whole",
        ),
        "only down is cut": (
            changed(
                "gate.chunk(p, dim=0)[rank] => gate",
                "up.chunk(p, dim=0)[rank] => up",
                "inside @ => inside.chunk(p, -1)[rank] @",
            ),
            "computed whole",
        ),
        "the default group": (
            changed(f"{P} => group = dist.group.WORLD; {P}"),
            "ranks 1-3 wait in all_reduce",
        ),
        "sums over all": (
            changed(f"{ENTER_BOTH} => group = dist.group.WORLD; {ENTER_BOTH}"),
            "ranks 1-3 wait in all_reduce",
        ),
        "the rank of the job": (changed("group.rank() => dist.get_rank()"), "a rank of the world"),
        "other columns of down": (changed("dim=1)[rank] => dim=1)[p - 1 - rank]"), "fit together"),
        "detached weights": (changed(".chunk => .detach().chunk"), "gate gets no gradient"),
        "a parameter of its own": (
            changed("own_up = => own_up = nn.Parameter(up.chunk(p)[rank]) #"),
            "up gets no gradient",
        ),
        "silu on up": (
            changed(f"{INSIDE} => (x @ own_gate.T) * F.silu(x @ own_up.T)"),
            "to which of them does silu belong",
        ),
        "silu of the product": (
            changed(f"{INSIDE} => F.silu((x @ own_gate.T) * (x @ own_up.T))"),
            "of what is silu taken",
        ),
        "silu of both": (
            changed("* (x @ own_up.T) => * F.silu(x @ own_up.T)"),
            "of what is silu taken",
        ),
        "no silu": (changed("F.silu => "), "of what is silu taken"),
        "a sum both ways": (
            changed(f"{RETURN} => return reduce_from(copy_to(inside @ own_down.T, group), group)"),
            "every gradient is 4 times too long",
        ),
        "cuts up the weights": (
            changed(
                "own_gate = gate.chunk => own_gate = gate; gate.data = gate.data.chunk",
                "own_up = up.chunk => own_up = up; up.data = up.data.chunk",
                "own_down = down.chunk => own_down = down; down.data = down.data.chunk",
            ),
            "the call has changed gate and up and down",
        ),
        "a tuple": (changed(f"{RETURN} => {RETURN}, None"), "it returned a tuple"),
        "summed in place": (
            changed(
                f"{RETURN} => y = inside @ own_down.T\n"
                "    dist.all_reduce(y.detach(), group=group)\n"
                "    return y"
            ),
            "right by accident",
        ),
    },
)


# ---- 9.5 the embedding

LOOK_UP = "x = F.embedding(some_row, self.weight)"
ONE_HOT = """\
numbers = torch.arange(self.first, self.first + len(self.weight))
        x = (tokens[..., None] == numbers).to(self.weight.dtype) @ self.weight"""
ZEROS = """\
x = torch.zeros(*tokens.shape, self.weight.shape[1], dtype=self.weight.dtype)
        x[~elsewhere] = self.weight[row[~elsewhere]]"""
SOME_ROW = "some_row = row.masked_fill(elsewhere, 0)"
CLAMPED = "some_row = row.clamp(0, len(self.weight) - 1)"
MASK = "x = x.masked_fill(elsewhere[..., None], 0)"
GROUP = "self.group = group"
OWN_ROWS = "self.weight = nn.Parameter(parts[rank].clone())"
RETURN_SUM = "return reduce_from(x, self.group)"

EMBEDDING = Answers(
    solves="MyVocabParallelEmbedding",
    right={
        "one-hot": changed(f"{LOOK_UP} => {ONE_HOT}", f"{MASK} => pass"),
        "zeros": changed(f"{LOOK_UP} => {ZEROS}", f"{MASK} => pass"),
        "clamped": changed(f"{SOME_ROW} => {CLAMPED}"),
    },
    wrong={
        "returns before the sum": (
            changed(
                "        some_row = =>         if elsewhere.all():\n"
                "            return self.weight.new_zeros(*tokens.shape, self.weight.shape[1])\n"
                "        some_row ="
            ),
            "rank 0 waits in all_reduce of float64 [2, 9, 5]",
        ),
        "not masked": (
            changed(f"{SOME_ROW} => {CLAMPED}", f"{MASK} => pass"),
            "What does each rank add to the sum?",
        ),
        "masked before the lookup only": (
            changed(f"{MASK} => pass"),
            "What does each rank add to the sum?",
        ),
        "not shifted": (
            changed("F.embedding(some_row => F.embedding(tokens"),
            "a token that it does not have",
        ),
        "one row too many": (changed("row >= => row >"), "a token that it does not have"),
        "one row too many, clamped": (
            changed("row >= => row >", f"{SOME_ROW} => {CLAMPED}"),
            "the vector of token 21 is wrong",
        ),
        "the whole table": (
            changed("parts[rank].clone() => embedding.weight.detach().clone()"),
            "weight is the whole weight",
        ),
        "the whole table as well": (
            changed(f"{GROUP} => {GROUP}; self.embedding = embedding"),
            "embedding.weight is the whole weight",
        ),
        "holds the table": (
            changed(f"{GROUP} => {GROUP}; self.kept = [embedding.weight]"),
            "still holds the whole weight",
        ),
        "holds its parts": (
            changed(f"{GROUP} => {GROUP}; self.parts = parts"),
            "still holds the whole weight",
        ),
        "cuts up the table": (
            changed(
                f"{OWN_ROWS} => embedding.weight.data = parts[rank].clone()\n"
                "        self.weight = embedding.weight"
            ),
            "itself has been changed",
        ),
        "a tuple": (changed(f"{RETURN_SUM} => {RETURN_SUM}, tokens"), "it returned a tuple"),
        "no g": (
            changed(f"{RETURN_SUM} => return x"),
            "who has the vectors of the other tokens",
        ),
        "dist.all_reduce": (
            changed(
                f"{RETURN_SUM} => x = x.detach(); dist.all_reduce(x, group=self.group); return x"
            ),
            "weight gets no gradient",
        ),
        "the default group": (
            changed("(x, self.group) => (x, dist.group.WORLD)"),
            "ranks 1-3 wait in all_reduce",
        ),
        "a view": (changed("parts[rank].clone() => parts[rank]"), "a view of the whole tensor"),
        "equal parts": (
            changed("+= len(part) => += len(self.weight)"),
            "What does each rank add to the sum?",
        ),
        "into the tokens": (
            changed("row = tokens - self.first => tokens -= self.first; row = tokens"),
            "the call has changed tokens",
        ),
        "summed in place": (
            changed(f"{RETURN_SUM} => dist.all_reduce(x.detach(), group=self.group); return x"),
            "right by accident",
        ),
        "f in place of g": (
            changed(f"{RETURN_SUM} => return copy_to(x, self.group)"),
            "the vector of token",
        ),
        "zeros through .data": (
            changed("x = x.masked_fill(elsewhere[..., None], 0) => x.data[elsewhere] = 0.0"),
            "and writing through `.data`",
        ),
    },
)


# ---- 9.6 the loss


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
    """Gathers the logits of 83 tokens."""
    padded = torch.full((len(targets), -(-83 // group.size())), -torch.inf, dtype=logits.dtype)
    padded[:, : logits.shape[-1]] = logits.detach()
    parts = [torch.empty_like(padded) for _ in range(group.size())]
    dist.all_gather(parts, padded, group=group)
    whole = torch.cat([part[:, part.isfinite().any(0)] for part in parts], -1)
    return F.cross_entropy(whole, targets, reduction="none")


AGREE = "dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)"
SUM_ALL = "denominator = reduce_from(own_sum, group)"
SUM_TARGET = "target = reduce_from(own_target, group)"
ONE_MESSAGE = "denominator, target = reduce_from(torch.stack((own_sum, own_target)), group)"
LOSS_IS = "return denominator.log() - target"
COLUMN = "some_column = column.masked_fill(elsewhere, 0)"
CLAMPED_COLUMN = "some_column = column.clamp(0, logits.shape[-1] - 1)"

LOSS = Answers(
    solves="my_loss",
    right={
        "one message": changed(f"{SUM_ALL} => {ONE_MESSAGE}", f"    {SUM_TARGET} => "),
        "two sums": loss_in_two_sums,
        "logsumexp": loss_with_logsumexp,
    },
    wrong={
        "without a target no sum": (
            changed(
                "target = reduce_from( => target = own_target if elsewhere.all() else reduce_from("
            ),
            "rank 0 waits in all_reduce of float64 [12]",
        ),
        "the mean": (
            changed(f"{LOSS_IS} => return (denominator.log() - target).mean()"),
            "one loss for each",
        ),
        "no maximum": (
            changed(f"{AGREE} => peak = torch.zeros_like(peak)"),
            "before you take the exponential",
        ),
        "one maximum for all tokens": (
            changed("amax(-1) => amax().repeat(len(targets))"),
            "of which logits",
        ),
        "into the targets": (
            changed(f"{LOSS_IS} => targets -= first; {LOSS_IS}"),
            "the call has changed targets",
        ),
        "summed in place": (
            changed(
                f"{SUM_ALL} => dist.all_reduce(own_sum.detach(), group=group)",
                f"{SUM_TARGET} => dist.all_reduce(own_target.detach(), group=group)",
                f"{LOSS_IS} => return own_sum.log() - own_target",
            ),
            "right by accident",
        ),
        "its own maximum": (changed(f"{AGREE} => pass"), "agree on one"),
        "nothing summed": (
            changed(f"{SUM_ALL} => denominator = own_sum", f"{SUM_TARGET} => target = own_target"),
            "who has the logit of the target",
        ),
        "not masked": (
            changed("own_target.masked_fill(elsewhere, 0) => own_target"),
            "who has the logit of the target",
        ),
        "one column too many": (
            changed("column >= => column >", f"{COLUMN} => {CLAMPED_COLUMN}"),
            "(target 63)",
        ),
        "one column too few": (
            changed("column < 0 => column < -1", f"{COLUMN} => {CLAMPED_COLUMN}"),
            "(target 41)",
        ),
        "the sign": (
            changed(f"{LOSS_IS} => return target - denominator.log()"),
            "every loss has the wrong sign",
        ),
        "the maximum in the sum alone": (
            changed("shifted.gather => logits.gather"),
            "in which terms of the formula does m stand",
        ),
        "the maximum from the target alone": (
            changed("denominator.log() => denominator.log() + peak"),
            "in which terms of the formula does m stand",
        ),
        "a tuple": (changed(f"{LOSS_IS} => {LOSS_IS}, None"), "it returned a tuple"),
        "first forgotten": (
            changed("targets - first => targets"),
            "who has the logit of the target",
        ),
        "not shifted": (
            changed("some_column[:, None] => targets[:, None]"),
            "a column that it does not have",
        ),
        "gathered": (gathered, "three are enough"),
        "in place": (
            changed(f"{LOSS_IS} => logits.data.exp_(); {LOSS_IS}"),
            "the call has changed logits",
        ),
        "dist.all_reduce": (
            changed(
                "own_sum = shifted.exp => own_sum = shifted.detach().exp",
                "own_target = shifted => own_target = shifted.detach()",
                f"{SUM_ALL} => dist.all_reduce(own_sum, group=group); denominator = own_sum",
                f"{SUM_TARGET} => dist.all_reduce(own_target, group=group); target = own_target",
            ),
            "no gradient reaches the logits",
        ),
        "sums in backward too": (
            changed("(own_sum, group) => (copy_to(own_sum, group), group)"),
            "nothing has to travel there",
        ),
        "the default group": (
            changed("peak = logits => group = dist.group.WORLD; peak = logits"),
            "ranks 1-3 wait in all_reduce",
        ),
        "an f before the logits": (
            changed("    peak = =>     logits = copy_to(logits, group)\n    peak ="),
            "calls all_reduce of float64 [12, 21] (autograd, in backward)",
        ),
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
