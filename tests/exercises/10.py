"""Answers to the exercises of lesson 10, sequence parallel and activation memory."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from answers import Answers, changed
from torch import nn

from labcode.comm.collectives import start_all_gather, start_reduce_scatter
from labcode.parallel.sequence import gathered_linear, scatter_sequence

# ---- 10.1 what a layer keeps


def layer_bytes_in_numbers(s, b, h, a, t):
    sbh = s * b * h
    return {
        "norms": 4 * sbh,
        "attention": sbh * (3 + 8 / t) + 5 * a * s**2 * b / t,
        "mlp": sbh * (3 + 16 / t),
    }


def layer_bytes_in_tensors(s, b, h, a, t):
    x = torch.tensor(float(s * b * h))
    score = torch.tensor(float(a * s * s * b))
    whole = {"norms": [2 * x, 2 * x], "attention": [2 * x, x], "mlp": [2 * x, x]}
    cut = {
        "norms": [],
        "attention": [2 * x, 2 * x, 2 * score, score, 2 * score, 2 * x, 2 * x],
        "mlp": [8 * x, 8 * x],
    }
    kept = {}
    for part in whole:
        kept[part] = sum(whole[part]) + sum(cut[part]) / t
    return kept


NORMS = "2 * hidden,\n"
MLP = "hidden + 2 * 4 * hidden / t + mask"

LAYER = Answers(
    solves="layer_bytes",
    takes_ranks=False,
    right={
        "in numbers": layer_bytes_in_numbers,
        "in lists of tensors": layer_bytes_in_tensors,
    },
    wrong={
        "one norm": (changed(f"{NORMS} => hidden,\n"), "norms on one rank"),
        "norms cut": (changed(f"{NORMS} => 2 * hidden / t,\n"), "norms: right on one rank"),
        "no mask after proj": (
            changed('/ t + mask,\n        "mlp => / t,\n        "mlp'),
            "or whose mask, is missing",
        ),
        "no dropout on the scores": (
            changed("table + table_mask + table => table"),
            "you count 2 bytes for each score",
        ),
        "scores whole": (
            changed("own_heads / t => (qkv + hidden) / t + 2 * table + table_mask"),
            "has half of the heads, and so half of the tables",
        ),
        "heads forgotten": (
            changed("a * s * s * b => s * s * b"),
            "each of the a heads has a table of its own",
        ),
        "no tables": (
            changed("table + table_mask + table + hidden => hidden"),
            "you count 0 bytes for each score",
        ),
        "all of it cut": (
            changed(f"{MLP} => (hidden + 2 * 4 * hidden + mask) / t"),
            "hold all h features on every rank",
        ),
        "input of up twice": (changed(f"{MLP} => {MLP} + hidden"), "too much"),
        "masks of two bytes": (changed(f"{MLP} => {MLP} + mask"), "too much"),
        "GELU's output forgotten": (changed("2 * 4 * hidden => 4 * hidden"), "too little"),
        "no dict": (changed("return { => return 34 * s * b * h\n    {"), "return a dict"),
        "numbers in place of bytes": (
            changed(
                "hidden = 2 * s => hidden = s",
                "mask = s * b * h => mask = s * b * h / 2",
                "2 * a * s => a * s",
                "table_mask = a * s => table_mask = a / 2 * s",
            ),
            "norms on one rank",
        ),
    },
)

# ---- 10.2 the pair


def gathered(x, group):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim=1)


def scattered(x, group):
    parts = [part.contiguous() for part in x.chunk(dist.get_world_size(group), dim=1)]
    own = torch.empty_like(parts[0])
    dist.reduce_scatter(own, parts, group=group)
    return own


def function(there, back):
    """A Function of two operations `(x, group) -> tensor`."""

    class Made(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, group):
            ctx.group = group
            return there(x, group)

        @staticmethod
        def backward(ctx, grad):
            return back(grad, ctx.group), None

    return Made


def gathered_by_messages(x, group):
    p = dist.get_world_size(group)
    rank = dist.get_rank(group)
    parts = {rank: x.contiguous()}
    for step in range(1, p):
        parts[(rank - step) % p] = torch.empty_like(parts[rank])
        send = dist.P2POp(dist.isend, parts[rank], group=group, group_peer=(rank + step) % p)
        receive = dist.P2POp(
            dist.irecv, parts[(rank - step) % p], group=group, group_peer=(rank - step) % p
        )
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()
    return torch.cat([parts[i] for i in range(p)], 1)


def gathered_flat(x, group):
    """In one tensor, which is then put in order."""
    p = dist.get_world_size(group)
    out = x.new_empty(p * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return torch.cat(out.chunk(p, 0), 1)


def scattered_flat(x, group):
    p = dist.get_world_size(group)
    rows = torch.cat(x.chunk(p, 1), 0).contiguous()
    own = rows.new_empty(x.shape[0], x.shape[1] // p, x.shape[2])
    dist.reduce_scatter_tensor(own, rows, group=group)
    return own


GATHER = function(gathered, scattered)
SCATTER = function(scattered, gathered)
FLAT = (function(gathered_flat, scattered_flat), function(scattered_flat, gathered_flat))
MESSAGES = (function(gathered_by_messages, scattered), SCATTER)
# Each of the two functions of the solution is used in two places.
GATHER_FORWARD = "return gather_tokens(x, group)"
GATHER_BACKWARD = "return scatter_tokens(grad, ctx.group), None"
SCATTER_FORWARD = "return scatter_tokens(x, group)"
SCATTER_BACKWARD = "return gather_tokens(grad, ctx.group), None"
OWN_TOKENS = "chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()"

PAIR = Answers(
    solves=("AllGather", "ReduceScatter"),
    right={"lists": (GATHER, SCATTER), "flat": FLAT, "messages": MESSAGES},
    wrong={
        "cut without contiguous": (
            changed("[part.contiguous() for part in x.chunk(t, dim=1)] => list(x.chunk(t, dim=1))"),
            "a tensor has gaps in its memory, NCCL refuses it",
        ),
        "an all-gather not waited for": (
            changed("(parts, x, group=group) => (parts, x, group=group, async_op=True)"),
            "1 all-gather started and 0 waited for",
        ),
        "own gradient": (
            changed(f"{GATHER_BACKWARD} => return grad.{OWN_TOKENS}, None"),
            "the other ranks have used these tokens as well",
        ),
        "mean of the gradients": (
            changed(f"{GATHER_BACKWARD} => return scatter_tokens(grad, ctx.group) / 4, None"),
            "the mean over",
        ),
        "joined along the batch": (
            changed("cat(parts, dim=1) => cat(parts)"),
            "the tokens are dim 1",
        ),
        "the wrong order": (
            changed("cat(parts, dim=1) => cat(parts[::-1], dim=1)"),
            "of all ranks in their order",
        ),
        "zeros": (
            changed(f"{GATHER_FORWARD} => return torch.zeros_like(gather_tokens(x, group))"),
            "of all ranks in their order",
        ),
        "no sum": (changed(f"{SCATTER_FORWARD} => return x.{OWN_TOKENS}"), "and no sum"),
        "the mean": (
            changed(f"{SCATTER_FORWARD} => return scatter_tokens(x, group) / group.size()"),
            "the mean over the ranks",
        ),
        "all_reduce and cut": (
            changed(
                f"{SCATTER_FORWARD} => total = x.clone()\n"
                "        dist.all_reduce(total, group=group)\n"
                f"        return total.{OWN_TOKENS}"
            ),
            "forward sends",
        ),
        "in place": (
            changed(
                f"{SCATTER_FORWARD} => dist.all_reduce(x, group=group)\n"
                f"        return x.{OWN_TOKENS}"
            ),
            "changed the x",
        ),
        "backward of the other": (
            changed(f"{SCATTER_BACKWARD} => return grad.repeat(1, ctx.group.size(), 1), None"),
            "whose gradients does it need",
        ),
        "the group ignored": (
            changed("group=group => group=None", "get_world_size(group) => get_world_size()"),
            "still speaks of all of them",
        ),
        "no return in forward": (changed(f"{GATHER_FORWARD} => pass"), "it returned None"),
        "no return in backward": (
            changed(f"{GATHER_BACKWARD} => return None, None"),
            "no gradient for x",
        ),
        "backward returns nothing at all": (
            changed(f"{GATHER_BACKWARD} => pass"),
            "backward gives 1 where 2 are expected",
        ),
        "cut along the batch": (
            changed("x.chunk(t, dim=1) => x.chunk(t, dim=0)"),
            "along which dim was it cut",
        ),
        "the two swapped": ((SCATTER, GATHER), "along which dim was it cut"),
        "as many parts as there are ranks in the world": (
            changed("get_world_size(group) => get_world_size()"),
            "a rank of the world, a fixed number?",
        ),
        "the gradient zeroed": (
            changed(
                f"{GATHER_BACKWARD} => own = scatter_tokens(grad, ctx.group)\n"
                "        grad.zero_()\n"
                "        return own, None"
            ),
            "changed the gradient that it was given",
        ),
        "labcode's": (
            changed(f"{GATHER_FORWARD} => return start_all_gather(x, group, 1)()"),
            "labcode's own answer",
        ),
        "only rank 0 of a group calls": (
            changed(
                f"{GATHER_FORWARD} => return gather_tokens(x, group) if group.rank() == 0 else x"
            ),
            "forward gives [2, 3, 8], expected is [2, 12, 8]",
        ),
        "x may be a slice": (
            changed("    x = x.contiguous()\n => "),
            "pass x.contiguous()",
        ),
    },
)

# ---- 10.3 gather again


class WithEinsum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, group):
        ctx.group = group
        ctx.save_for_backward(x, weight)
        whole = gathered(x, group)
        return torch.einsum("bsh,fh->bsf", whole, weight)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        whole = gathered(x, ctx.group)
        grad_weight = torch.einsum("bsf,bsh->fh", grad, whole)
        grad_whole = torch.einsum("bsf,fh->bsh", grad, weight)
        return scattered(grad_whole, ctx.group), grad_weight, None


class OnCtx(torch.autograd.Function):
    """Keeps the part as an attribute, which is the same memory."""

    @staticmethod
    def forward(ctx, x, weight, group):
        ctx.x = x
        ctx.w = weight
        ctx.g = group
        return start_all_gather(x, group, 1)() @ weight.T

    @staticmethod
    def backward(ctx, grad):
        own = start_reduce_scatter(torch.matmul(grad, ctx.w), ctx.g, 1)()
        rows = start_all_gather(ctx.x, ctx.g, 1)().reshape(-1, ctx.x.shape[-1])
        return own, grad.reshape(-1, grad.shape[-1]).T @ rows, None


class ByMessages(WithEinsum):
    """Gathers with sends and receives."""

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        whole = gathered_by_messages(x, ctx.group)
        own = start_reduce_scatter(grad @ weight, ctx.group, 1)()
        return own, grad.flatten(0, 1).T @ whole.flatten(0, 1), None


SAVE = "ctx.save_for_backward(x, weight)"
WHOLE = "whole = start_all_gather(x, group, 1)()"
START = "wait_for_x = start_all_gather(x, ctx.group, 1)"
START_OWN = "wait_for_own = start_reduce_scatter(grad_whole, ctx.group, 1)"
OWN_ONLY = "grad_whole.chunk(dist.get_world_size(ctx.group), 1)[dist.get_rank(ctx.group)]"
LAST = "return wait_for_own(), grad_weight, None"

AGAIN = Answers(
    solves="GatherAgain",
    right={
        "einsum": WithEinsum,
        "kept as attributes": OnCtx,
        "by messages": ByMessages,
        # Python lets go of it when it next collects such circles
        "a circle of objects": changed(
            f"{WHOLE} => circle = [start_all_gather(x, group, 1)()]\n"
            "        circle.append(circle)\n"
            "        whole = circle[0]"
        ),
        "a copy of its part": changed(f"{SAVE} => ctx.save_for_backward(x.clone(), weight)"),
    },
    wrong={
        "zeros": (
            changed("return F.linear(whole, weight) => return 0 * F.linear(whole, weight)"),
            "nothing but zeros",
        ),
        "multiplies before gathering": (
            changed(
                "start_all_gather(x, group, 1)() => start_all_gather(x @ weight.T, group, 1)()",
                "return F.linear(whole, weight) => return whole",
            ),
            "multiplies before it gathers",
        ),
        "keeps the whole": (
            changed(
                f"{SAVE} => ",
                f"{WHOLE} => {WHOLE}\n        ctx.save_for_backward(whole, weight)",
                f"{START} => whole = x",
                "whole = wait_for_x() => pass",
            ),
            "kept from forward to backward by ctx.save_for_backward",
        ),
        "keeps the whole as attribute": (
            changed(
                f"{WHOLE} => {WHOLE}\n        ctx.whole = whole",
                f"{START} => pass",
                "whole = wait_for_x() => whole = ctx.whole",
            ),
            "kept from forward to backward by ctx itself",
        ),
        "keeps the closure, and gathers again": (
            changed(
                f"{WHOLE} => ctx.wait = start_all_gather(x, group, 1)\n        whole = ctx.wait()"
            ),
            "by ctx itself",
        ),
        "keeps the whole, and gathers for show": (
            changed(
                f"{WHOLE} => {WHOLE}\n        ctx.whole = whole",
                "whole = wait_for_x() => whole = ctx.whole\n        wait_for_x()",
            ),
            "by ctx itself",
        ),
        "keeps the whole in a dict": (
            changed(
                f"{WHOLE} => {WHOLE}\n        ctx.cache = {{'full': whole}}",
                f"{START} => pass",
                "whole = wait_for_x() => whole = ctx.cache['full']",
            ),
            "by ctx itself",
        ),
        "all_reduce and cut": (
            changed(
                f"{START_OWN} => dist.all_reduce(grad_whole, group=ctx.group)",
                f"wait_for_own(), => {OWN_ONLY},",
            ),
            "it calls all_gather, all_reduce",
        ),
        "zeroes the gradient": (
            changed(f"{LAST} => grad.zero_()\n        {LAST}"),
            "changed the gradient that it was given",
        ),
        "the weight's gradient summed": (
            changed(f"{LAST} => dist.all_reduce(grad_weight, group=ctx.group)\n        {LAST}"),
            "nothing is to be summed",
        ),
        "no return": (
            changed(f"{LAST} => wait_for_own()"),
            "backward gives 1 where 3 are expected",
        ),
        "no sum": (
            changed(f"{START_OWN} => ", f"wait_for_own(), => {OWN_ONLY},"),
            "the other ranks used these tokens",
        ),
        "weight from own tokens": (
            changed(
                "grad.flatten(0, 1).T @ whole.flatten(0, 1) => "
                "grad.chunk(4, 1)[dist.get_rank()].flatten(0, 1).T @ x.flatten(0, 1)"
            ),
            "the rows of all S tokens",
        ),
        "gathers twice": (
            changed(f"{START} => {START}\n        wait_for_x()\n        {START}"),
            "one for x is enough",
        ),
        "the group ignored": (
            changed("(x, group, 1) => (x, dist.group.WORLD, 1)"),
            "still speaks of all of them",
        ),
        "no gradients": (
            changed(f"{LAST} => wait_for_own()\n        return None, None, None"),
            "no gradient for x",
        ),
        "no gradient for the weight": (
            changed(f"{LAST} => return wait_for_own(), None, None"),
            "a gradient for x, one for weight",
        ),
        "labcode's": (
            changed(
                f"{WHOLE} => return gathered_linear(x, nn.Parameter(weight.detach()), None, group)"
            ),
            "labcode's own answer",
        ),
    },
)

# ---- 10.4 the MLP


class Weights(nn.Module):
    def __init__(self, weights, group):
        super().__init__()
        self.group = group
        for name, weight in weights.items():
            self.register_parameter(name, nn.Parameter(weight))


class MlpInOneMessage(Weights):
    def forward(self, x):
        normed = F.layer_norm(x, (x.size(-1),), self.norm_weight, self.norm_bias)
        activated = F.gelu(gathered_linear(normed, self.up, self.up_bias, self.group))
        own = scatter_sequence(F.linear(activated, self.down), self.group)
        return own + self.down_bias + x

    def finish_gradient_sync(self):
        shared = [self.norm_weight, self.norm_bias, self.down_bias]
        flat = torch.cat([param.grad for param in shared])
        dist.all_reduce(flat, group=self.group)
        for param, grad in zip(shared, flat.chunk(3)):
            param.grad.copy_(grad)


class MlpWithOwnFunctions(Weights):
    def forward(self, x):
        h = F.layer_norm(x, x.shape[-1:], self.norm_weight, self.norm_bias)
        h = F.gelu(WithEinsum.apply(h, self.up, self.group) + self.up_bias)
        return x + SCATTER.apply(h @ self.down.T, self.group) + self.down_bias

    def finish_gradient_sync(self):
        for name, param in self.named_parameters():
            if name in ("norm_weight", "norm_bias", "down_bias"):
                total = param.grad.clone()
                dist.all_reduce(total, group=self.group)
                param.grad = total


NORM = "F.layer_norm(x, x.shape[-1:], self.norm_weight, self.norm_bias)"
UP = "h = gathered_linear(h, self.up, self.up_bias, self.group)"
PLAIN_UP = "F.linear(all_gather(h, self.group, 1), self.up, self.up_bias)"
# a name that the lesson does not import
CLASS = "class SequenceParallelMLP("
IMPORTED = f"{CLASS} => from labcode.comm.collectives import all_gather\n\n\n{CLASS}"
Y = "return x + h + self.down_bias"
PARAMS = "(self.norm_weight, self.norm_bias, self.down_bias)"
ALL_REDUCE = "dist.all_reduce(param.grad, group=self.group)"

SEQUENCE_PARALLEL = Answers(
    solves="SequenceParallelMLP",
    right={
        "one message": MlpInOneMessage,
        "own functions": MlpWithOwnFunctions,
        # keeps one tensor of its own tokens more
        "the norm by hand": changed(
            f"{NORM} => F.layer_norm(x, x.shape[-1:]) * self.norm_weight + self.norm_bias"
        ),
    },
    wrong={
        "the sums not waited for": (
            changed(
                f"{ALL_REDUCE} => dist.all_reduce(param.grad, group=self.group, async_op=True)"
            ),
            "3 all-reduces started and 0 waited for",
        ),
        "gelu by tanh": (
            changed("F.gelu(h) => F.gelu(h, approximate='tanh')"),
            "with their defaults",
        ),
        "bias before the sum": (
            changed(
                "F.gelu(h), self.down) => F.gelu(h), self.down, self.down_bias)",
                f"{Y} => return x + h",
            ),
            "as often as there are ranks",
        ),
        "no residual": (changed(f"{Y} => return h + self.down_bias"), "goes past the MLP"),
        "no bias": (
            changed(f"{Y} => return x + h"),
            "down_bias has no gradient: is it used in forward?",
        ),
        "plain all-gather": (
            changed(IMPORTED, f"{UP} => h = {PLAIN_UP}"),
            "of all S tokens are kept",
        ),
        "norm of all tokens": (  # as tensor parallelism alone
            changed(
                IMPORTED,
                f"{NORM} => {NORM.replace('(x', '(all_gather(x, self.group, 1)', 1)}",
                f"{UP} => h = F.linear(h, self.up, self.up_bias)",
            ),
            "of all S tokens are kept",
        ),
        "GELU by hand": (
            changed("F.gelu(h) => h * 0.5 * (1 + torch.erf(h / 2**0.5))"),
            "of all S tokens are kept",
        ),
        "other names": (
            changed("register_parameter(name, => register_parameter('my_' + name,"),
            "the module has no parameter down",
        ),
        "never gathers": (
            changed(
                f"{UP} => h = F.linear(h, self.up, self.up_bias)",
                "h = scatter_sequence(h, self.group) => pass",
            ),
            "not what one process gives",
        ),
        "no sync": (
            changed(f"{ALL_REDUCE} => pass"),
            "leaves the gradient of norm_weight as it was",
        ),
        "norms only": (
            changed(f"{PARAMS} => (self.norm_weight, self.norm_bias)"),
            "leaves the gradient of down_bias as it was",
        ),
        "sums everything": (
            changed(f"{PARAMS} => self.parameters()"),
            "was complete before finish_gradient_sync",
        ),
        "averages": (
            changed(f"{ALL_REDUCE} => {ALL_REDUCE}\n            param.grad /= self.group.size()"),
            "is the mean over the ranks",
        ),
        "the world's sum": (
            changed(f"{ALL_REDUCE} => dist.all_reduce(param.grad)"),
            "still speaks of all of them",
        ),
        "no return": (changed(f"{Y} => pass"), "it returned None"),
    },
)

ANSWERS = {"10.1": LAYER, "10.2": PAIR, "10.3": AGAIN, "10.4": SEQUENCE_PARALLEL}
