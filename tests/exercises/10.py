"""Answers to the exercises of lesson 10, sequence parallel and activation memory."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from answers import Answers
from torch import nn

from labcode.comm import collectives
from labcode.comm.collectives import start_all_gather, start_reduce_scatter
from labcode.parallel.sequence import gathered_linear, scatter_sequence
from labcode.teach.exercises import l10

# ---- 10.1 what a layer keeps


def layer_bytes(s, b, h, a, t=1):
    hidden = 2 * s * b * h
    mask = s * b * h
    scores = a * s * s * b
    attention_cut = 3 * hidden + 2 * scores + scores + 2 * scores + hidden
    return {
        "norms": 2 * hidden,
        "attention": hidden + mask + attention_cut / t,
        "mlp": hidden + mask + 2 * 4 * hidden / t,
    }


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


def changed(part, change):
    """The right answer with one part counted in another way."""

    def answer(s, b, h, a, t=1):
        kept = layer_bytes(s, b, h, a, t)
        kept[part] = change(s * b * h, a * s * s * b, t)
        return kept

    return answer


LAYER = Answers(
    check=lambda answer, ranks: l10.layer_bytes(answer),
    right={
        "by tensor": layer_bytes,
        "in numbers": layer_bytes_in_numbers,
        "in lists of tensors": layer_bytes_in_tensors,
    },
    wrong={
        "one norm": (changed("norms", lambda x, y, t: 2 * x), "norms on one rank"),
        "norms cut": (changed("norms", lambda x, y, t: 4 * x / t), "norms: right on one rank"),
        "no mask after proj": (
            changed("attention", lambda x, y, t: 2 * x + (8 * x + 5 * y) / t),
            "or whose mask, is missing",
        ),
        "no dropout on the scores": (
            changed("attention", lambda x, y, t: 3 * x + (8 * x + 2 * y) / t),
            "you count 2 bytes for each score",
        ),
        "scores whole": (
            changed("attention", lambda x, y, t: 3 * x + 8 * x / t + 5 * y),
            "has half of the heads, and so half of the tables",
        ),
        "heads forgotten": (
            lambda s, b, h, a, t=1: {
                **layer_bytes(s, b, h, a, t),
                "attention": s * b * h * (3 + 8 / t) + 5 * s * s * b / t,
            },
            "each of the a heads has a table of its own",
        ),
        "no tables": (
            changed("attention", lambda x, y, t: 3 * x + 8 * x / t),
            "you count 0 bytes for each score",
        ),
        "all of it cut": (
            changed("mlp", lambda x, y, t: 19 * x / t),
            "hold all h features on every rank",
        ),
        "input of up twice": (changed("mlp", lambda x, y, t: 5 * x + 16 * x / t), "too much"),
        "masks of two bytes": (changed("mlp", lambda x, y, t: 4 * x + 16 * x / t), "too much"),
        "GELU's output forgotten": (
            changed("mlp", lambda x, y, t: 3 * x + 8 * x / t),
            "too little",
        ),
        "no dict": (lambda s, b, h, a, t=1: 34 * s * b * h, "return a dict"),
        "numbers in place of bytes": (
            lambda *sizes: {part: n / 2 for part, n in layer_bytes(*sizes).items()},
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


def scattered_in_pieces(x, group):
    """What is cut out along dim 1 has gaps in its memory."""
    parts = list(x.chunk(dist.get_world_size(group), dim=1))
    own = torch.empty_like(parts[0]).contiguous()
    dist.reduce_scatter(own, parts, group=group)
    return own


def gathered_without_waiting(x, group):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group, async_op=True)
    return torch.cat(parts, dim=1)


def own_tokens(x, group):
    return x.chunk(dist.get_world_size(group), 1)[dist.get_rank(group)].contiguous()


def all_reduced(x, group):
    total = x.clone()
    dist.all_reduce(total, group=group)
    return own_tokens(total, group)


def in_world(operation):
    return lambda x, group: operation(x, dist.group.WORLD)


def mean(x, group):
    return scattered(x, group) / dist.get_world_size(group)


def gathered_by_batch(x, group):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim=0)


def gathered_backwards(x, group):
    return torch.cat(gathered(x, group).chunk(dist.get_world_size(group), 1)[::-1], 1)


def adds_in_place(x, group):
    """all_reduce on the caller's own tensor."""
    with torch.no_grad():
        dist.all_reduce(x, group=group)
    return own_tokens(x, group)


def scattered_by_batch(x, group):
    parts = [part.contiguous() for part in x.chunk(dist.get_world_size(group), dim=0)]
    own = torch.empty_like(parts[0])
    dist.reduce_scatter(own, parts, group=group)
    return own


def gathered_from_the_world(x, group):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim=1)


def scattered_and_zeroed(grad, group):
    own = scattered(grad, group)
    grad.zero_()
    return own


class NoReturnInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return gathered(x, group)

    @staticmethod
    def backward(ctx, grad):
        scattered(grad, ctx.group)


GATHER = function(gathered, scattered)
SCATTER = function(scattered, gathered)
PAIR = Answers(
    check=lambda answer, ranks: l10.pair(*answer(), ranks),
    right={
        "lists": lambda: (GATHER, SCATTER),
        "flat": lambda: (
            function(gathered_flat, scattered_flat),
            function(scattered_flat, gathered_flat),
        ),
        "messages": lambda: (function(gathered_by_messages, scattered), SCATTER),
        "with the world where the group is the world": lambda: (
            function(lambda x, group: gathered(x, group), lambda x, group: scattered(x, group)),
            SCATTER,
        ),
    },
    wrong={
        "cut without contiguous": (
            lambda: (
                function(gathered, scattered_in_pieces),
                function(scattered_in_pieces, gathered),
            ),
            "does not lie in one piece",
        ),
        "an all-gather not waited for": (
            lambda: (function(gathered_without_waiting, scattered), SCATTER),
            "nobody waited for it",
        ),
        "own gradient": (
            lambda: (function(gathered, own_tokens), SCATTER),
            "the other ranks have used these tokens as well",
        ),
        "mean of the gradients": (lambda: (function(gathered, mean), SCATTER), "the mean over"),
        "joined along the batch": (
            lambda: (function(gathered_by_batch, scattered), SCATTER),
            "the tokens are dim 1",
        ),
        "the wrong order": (
            lambda: (function(gathered_backwards, scattered), SCATTER),
            "of all ranks in their order",
        ),
        "zeros": (
            lambda: (
                function(lambda x, group: x.new_zeros(2, x.shape[1] * group.size(), 8), scattered),
                SCATTER,
            ),
            "of all ranks in their order",
        ),
        "no sum": (lambda: (GATHER, function(own_tokens, gathered)), "and no sum"),
        "the mean": (lambda: (GATHER, function(mean, gathered)), "the mean over the ranks"),
        "all_reduce and cut": (
            lambda: (GATHER, function(all_reduced, gathered)),
            "forward sends",
        ),
        "in place": (
            lambda: (GATHER, function(adds_in_place, gathered)),
            "changed the x",
        ),
        "backward of the other": (
            lambda: (GATHER, function(scattered, lambda x, group: x.repeat(1, group.size(), 1))),
            "whose gradients does it need",
        ),
        "the group ignored": (
            lambda: (function(in_world(gathered), in_world(scattered)), SCATTER),
            "still speaks of all of them",
        ),
        "no return in forward": (
            lambda: (function(lambda x, group: None, scattered), SCATTER),
            "it returned None",
        ),
        "no return in backward": (
            lambda: (function(gathered, lambda x, group: None), SCATTER),
            "no gradient for x",
        ),
        "backward returns nothing at all": (
            lambda: (NoReturnInBackward, SCATTER),
            "backward gives 1 where 2 are due",
        ),
        "cut along the batch": (
            lambda: (GATHER, function(scattered_by_batch, gathered)),
            "along which dim was it cut",
        ),
        "the two swapped": (lambda: (SCATTER, GATHER), "along which dim was it cut"),
        "as many parts as there are ranks in the world": (
            lambda: (function(gathered_from_the_world, scattered), SCATTER),
            "a rank of the world, a fixed number?",
        ),
        "the gradient zeroed": (
            lambda: (function(gathered, scattered_and_zeroed), SCATTER),
            "changed the gradient that it was given",
        ),
        "labcode's": (
            lambda: (
                function(
                    lambda x, group: collectives.all_gather(x, group, 1),
                    lambda x, group: collectives.reduce_scatter(x, group, 1),
                ),
                SCATTER,
            ),
            "labcode's own answer",
        ),
        "only rank 0 of a group calls": (
            lambda: (
                function(
                    lambda x, group: gathered(x, group) if group.rank() == 0 else x, scattered
                ),
                SCATTER,
            ),
            "waits",
        ),
    },
)

# ---- 10.3 gather again


class InOrder(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, group):
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return F.linear(start_all_gather(x, group, 1)(), weight)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        finish = start_all_gather(x, ctx.group, 1)
        own = start_reduce_scatter(grad @ weight, ctx.group, 1)
        grad_weight = grad.flatten(0, 1).T @ finish().flatten(0, 1)
        return own(), grad_weight, None


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


def again(
    part=True,
    attribute=False,
    scatter=True,
    whole_weight_gradient=True,
    gathers=1,
    zeros=False,
    multiply_first=False,
    world=False,
    no_return=False,
):
    """A Function with one thing done differently."""

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, group):
            group = dist.group.WORLD if world else group
            ctx.group = group
            ctx.kept = None
            if multiply_first:
                ctx.save_for_backward(x, weight)
                return start_all_gather(x @ weight.T, group, 1)()
            whole = start_all_gather(x, group, 1)()
            ctx.save_for_backward(x if part else whole, weight)
            if attribute:
                ctx.kept = whole
            if zeros:
                return x.new_zeros(x.shape[0], whole.shape[1], weight.shape[0])
            return F.linear(whole, weight)

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            whole = x if ctx.kept is None else ctx.kept
            tokens = grad.shape[1] // ctx.group.size()
            mine = slice(ctx.group.rank() * tokens, (ctx.group.rank() + 1) * tokens)
            for _ in range(gathers if part and not attribute else 0):
                whole = start_all_gather(x, ctx.group, 1)()
            grad_x = grad @ weight
            grad_x = start_reduce_scatter(grad_x, ctx.group, 1)() if scatter else grad_x[:, mine]
            seen = slice(None) if whole_weight_gradient else mine
            grad_weight = grad[:, seen].flatten(0, 1).T @ whole[:, seen].flatten(0, 1)
            if no_return:
                return None, None, None
            return grad_x, grad_weight, None

    return Again


class ByMessages(InOrder):
    """Gathers with sends and receives."""

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        whole = gathered_by_messages(x, ctx.group)
        own = start_reduce_scatter(grad @ weight, ctx.group, 1)()
        return own, grad.flatten(0, 1).T @ whole.flatten(0, 1), None


class KeepsACopyOfItsPart(InOrder):
    @staticmethod
    def forward(ctx, x, weight, group):
        ctx.save_for_backward(x.clone(), weight)
        ctx.group = group
        return F.linear(gathered(x, group), weight)


class AllReduceAndCut(InOrder):
    """Twice the bytes of a reduce-scatter."""

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        wait = start_all_gather(x, ctx.group, 1)
        dx = grad @ weight
        dist.all_reduce(dx, group=ctx.group)
        mine = dx.chunk(ctx.group.size(), 1)[ctx.group.rank()]
        return mine, grad.flatten(0, 1).T @ wait().flatten(0, 1), None


class KeepsTheClosure(InOrder):
    @staticmethod
    def forward(ctx, x, weight, group):
        ctx.save_for_backward(x, weight)
        ctx.group = group
        ctx.wait = start_all_gather(x, group, 1)
        return F.linear(ctx.wait(), weight)


class GathersForShow(InOrder):
    @staticmethod
    def forward(ctx, x, weight, group):
        ctx.save_for_backward(x, weight)
        ctx.group = group
        ctx.full = gathered(x, group)
        return F.linear(ctx.full, weight)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        start_all_gather(x, ctx.group, 1)()
        own = start_reduce_scatter(grad @ weight, ctx.group, 1)()
        return own, grad.flatten(0, 1).T @ ctx.full.flatten(0, 1), None


class KeepsInADict(GathersForShow):
    @staticmethod
    def forward(ctx, x, weight, group):
        ctx.save_for_backward(x, weight)
        ctx.group = group
        ctx.cache = {"full": gathered(x, group)}
        return F.linear(ctx.cache["full"], weight)

    @staticmethod
    def backward(ctx, grad):
        _, weight = ctx.saved_tensors
        own = start_reduce_scatter(grad @ weight, ctx.group, 1)()
        return own, grad.flatten(0, 1).T @ ctx.cache["full"].flatten(0, 1), None


class ZeroesTheGradient(InOrder):
    @staticmethod
    def backward(ctx, grad):
        found = InOrder.backward(ctx, grad)
        grad.zero_()
        return found


class SumsTheWeight(InOrder):
    @staticmethod
    def backward(ctx, grad):
        grad_x, grad_weight, _ = InOrder.backward(ctx, grad)
        dist.all_reduce(grad_weight, group=ctx.group)
        return grad_x, grad_weight, None


class NoReturnAtAll(InOrder):
    @staticmethod
    def backward(ctx, grad):
        InOrder.backward(ctx, grad)


class Labcodes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, group):
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return gathered_linear(x, nn.Parameter(weight.detach()), None, group)

    @staticmethod
    def backward(ctx, grad):
        return InOrder.backward(ctx, grad)


AGAIN = Answers(
    check=lambda answer, ranks: l10.gathers_again(answer(), ranks),
    right={
        "both under way": lambda: InOrder,
        "einsum": lambda: WithEinsum,
        "kept as attributes": lambda: OnCtx,
        "by messages": lambda: ByMessages,
        "a copy of its part": lambda: KeepsACopyOfItsPart,
    },
    wrong={
        "zeros": (lambda: again(zeros=True), "nothing but zeros"),
        "multiplies before gathering": (
            lambda: again(multiply_first=True),
            "multiplies before it gathers",
        ),
        "keeps the whole": (
            lambda: again(part=False),
            "kept from forward to backward by ctx.save_for_backward",
        ),
        "keeps the whole as attribute": (
            lambda: again(attribute=True),
            "kept from forward to backward by ctx itself",
        ),
        "keeps the closure, and gathers again": (lambda: KeepsTheClosure, "by ctx itself"),
        "keeps the whole, and gathers for show": (lambda: GathersForShow, "by ctx itself"),
        "keeps the whole in a dict": (lambda: KeepsInADict, "by ctx itself"),
        "all_reduce and cut": (lambda: AllReduceAndCut, "it calls all_gather, all_reduce"),
        "zeroes the gradient": (
            lambda: ZeroesTheGradient,
            "changed the gradient that it was given",
        ),
        "the weight's gradient summed": (lambda: SumsTheWeight, "nothing is to be summed"),
        "no return": (lambda: NoReturnAtAll, "backward gives 1 where 3 are due"),
        "no sum": (lambda: again(scatter=False), "the other ranks used these tokens"),
        "weight from own tokens": (
            lambda: again(whole_weight_gradient=False),
            "the rows of all S tokens",
        ),
        "gathers twice": (lambda: again(gathers=2), "one for x is enough"),
        "the group ignored": (lambda: again(world=True), "still speaks of all of them"),
        "no gradients": (lambda: again(no_return=True), "a gradient for x, one for weight"),
        "labcode's": (lambda: Labcodes, "labcode's own answer"),
    },
)

# ---- 10.4 the MLP


class Weights(nn.Module):
    def __init__(self, weights, group):
        super().__init__()
        self.group = group
        for name, weight in weights.items():
            self.register_parameter(name, nn.Parameter(weight))


class Mlp(Weights):
    def forward(self, x):
        h = F.layer_norm(x, x.shape[-1:], self.norm_weight, self.norm_bias)
        h = gathered_linear(h, self.up, self.up_bias, self.group)
        h = F.gelu(h) @ self.down.T
        return x + scatter_sequence(h, self.group) + self.down_bias

    def finish_gradient_sync(self):
        for param in (self.norm_weight, self.norm_bias, self.down_bias):
            dist.all_reduce(param.grad, group=self.group)


class MlpWithoutWaiting(Mlp):
    def finish_gradient_sync(self):
        for param in (self.norm_weight, self.norm_bias, self.down_bias):
            dist.all_reduce(param.grad, group=self.group, async_op=True)


class MlpWithGeluByTanh(Mlp):
    def forward(self, x):
        h = F.layer_norm(x, x.shape[-1:], self.norm_weight, self.norm_bias)
        h = F.gelu(gathered_linear(h, self.up, self.up_bias, self.group), approximate="tanh")
        return x + scatter_sequence(h @ self.down.T, self.group) + self.down_bias


class MlpInOneMessage(Mlp):
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


class MlpWithOwnFunctions(Mlp):
    def forward(self, x):
        h = F.layer_norm(x, x.shape[-1:], self.norm_weight, self.norm_bias)
        h = F.gelu(InOrder.apply(h, self.up, self.group) + self.up_bias)
        return x + SCATTER.apply(h @ self.down.T, self.group) + self.down_bias

    def finish_gradient_sync(self):
        for name, param in self.named_parameters():
            if name in ("norm_weight", "norm_bias", "down_bias"):
                total = param.grad.clone()
                dist.all_reduce(total, group=self.group)
                param.grad = total


class MlpWithTheNormByHand(Mlp):
    """Keeps one tensor of its own tokens more."""

    def forward(self, x):
        h = F.layer_norm(x, x.shape[-1:]) * self.norm_weight + self.norm_bias
        h = F.gelu(gathered_linear(h, self.up, self.up_bias, self.group))
        return x + scatter_sequence(h @ self.down.T, self.group) + self.down_bias


class GeluByHand(Mlp):
    """Keeps more of all tokens than GELU's input and output."""

    def forward(self, x):
        h = F.layer_norm(x, x.shape[-1:], self.norm_weight, self.norm_bias)
        h = gathered_linear(h, self.up, self.up_bias, self.group)
        h = h * 0.5 * (1 + torch.erf(h / 2**0.5))
        return x + scatter_sequence(h @ self.down.T, self.group) + self.down_bias


class OtherNames(Mlp):
    def __init__(self, weights, group):
        super().__init__({f"my_{name}": weight for name, weight in weights.items()}, group)


class BiasBeforeTheSum(Mlp):
    def forward(self, x):
        h = F.layer_norm(x, x.shape[-1:], self.norm_weight, self.norm_bias)
        h = F.gelu(gathered_linear(h, self.up, self.up_bias, self.group))
        return x + scatter_sequence(F.linear(h, self.down, self.down_bias), self.group)


class NoResidual(Mlp):
    def forward(self, x):
        return super().forward(x) - x


class NoDownBias(Mlp):
    def forward(self, x):
        return super().forward(x) - self.down_bias


class PlainGather(Mlp):
    def forward(self, x):
        h = F.layer_norm(x, x.shape[-1:], self.norm_weight, self.norm_bias)
        h = F.gelu(F.linear(collectives.all_gather(h, self.group, 1), self.up, self.up_bias))
        return x + scatter_sequence(h @ self.down.T, self.group) + self.down_bias


class NormAfterTheGather(Mlp):
    """As tensor parallelism alone: every rank normalises all tokens."""

    def forward(self, x):
        whole = collectives.all_gather(x, self.group, 1)
        h = F.layer_norm(whole, x.shape[-1:], self.norm_weight, self.norm_bias)
        h = F.gelu(F.linear(h, self.up, self.up_bias))
        return x + scatter_sequence(h @ self.down.T, self.group) + self.down_bias


class GeluOfThePartOnly(Mlp):
    """Forgets to gather: multiplies own tokens only."""

    def forward(self, x):
        h = F.layer_norm(x, x.shape[-1:], self.norm_weight, self.norm_bias)
        h = F.gelu(F.linear(h, self.up, self.up_bias))
        return x + F.linear(h, self.down) + self.down_bias


class NoSync(Mlp):
    def finish_gradient_sync(self):
        pass


class SumsNormsOnly(Mlp):
    def finish_gradient_sync(self):
        for param in (self.norm_weight, self.norm_bias):
            dist.all_reduce(param.grad, group=self.group)


class SumsEverything(Mlp):
    def finish_gradient_sync(self):
        for param in self.parameters():
            dist.all_reduce(param.grad, group=self.group)


class Averages(Mlp):
    def finish_gradient_sync(self):
        super().finish_gradient_sync()
        for param in (self.norm_weight, self.norm_bias, self.down_bias):
            param.grad /= dist.get_world_size(self.group)


class SyncInTheWorld(Mlp):
    def finish_gradient_sync(self):
        for param in (self.norm_weight, self.norm_bias, self.down_bias):
            dist.all_reduce(param.grad)


class NoReturn(Mlp):
    def forward(self, x):
        super().forward(x)


MLP = Answers(
    check=lambda answer, ranks: l10.sequence_parallel_mlp(answer(), ranks),
    right={
        "line by line": lambda: Mlp,
        "one message": lambda: MlpInOneMessage,
        "own functions": lambda: MlpWithOwnFunctions,
        "the norm by hand": lambda: MlpWithTheNormByHand,
    },
    wrong={
        "the sums not waited for": (lambda: MlpWithoutWaiting, "nobody waited for it"),
        "gelu by tanh": (lambda: MlpWithGeluByTanh, "with their defaults"),
        "bias before the sum": (lambda: BiasBeforeTheSum, "as often as there are ranks"),
        "no residual": (lambda: NoResidual, "goes past the MLP"),
        "no bias": (lambda: NoDownBias, "lacks down_bias"),
        "plain all-gather": (lambda: PlainGather, "of all S tokens are kept"),
        "norm of all tokens": (lambda: NormAfterTheGather, "of all S tokens are kept"),
        "GELU by hand": (lambda: GeluByHand, "of all S tokens are kept"),
        "other names": (lambda: OtherNames, "the module has no parameter down"),
        "never gathers": (lambda: GeluOfThePartOnly, "not what one process gives"),
        "no sync": (lambda: NoSync, "leaves the gradient of norm_weight as it was"),
        "norms only": (lambda: SumsNormsOnly, "leaves the gradient of down_bias as it was"),
        "sums everything": (lambda: SumsEverything, "was complete before finish_gradient_sync"),
        "averages": (lambda: Averages, "is the mean over the ranks"),
        "the world's sum": (lambda: SyncInTheWorld, "still speaks of all of them"),
        "no return": (lambda: NoReturn, "it returned None"),
    },
)

ANSWERS = {"10.1": LAYER, "10.2": PAIR, "10.3": AGAIN, "10.4": MLP}
