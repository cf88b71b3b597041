"""Answers to the exercises of lesson 24, expert parallelism."""

import torch
import torch.distributed as dist
from answers import Answers, changed
from torch.distributed._functional_collectives import all_to_all_single_autograd

from course.labs import l24_by_hand as by_hand
from labcode.parallel import experts

# ---- 24.1 from counts to splits


def splits_by_chunks(counts, num_ranks):
    return [int(part.sum()) for part in counts.chunk(num_ranks)]


def splits_by_a_loop(counts, num_ranks):
    splits = [0] * num_ranks
    each = len(counts) // num_ranks
    for expert, rows in enumerate(counts.tolist()):
        splits[expert // each] += rows
    return splits


def splits_by_differences(counts, num_ranks):
    ends = counts.cumsum(0)[len(counts) // num_ranks - 1 :: len(counts) // num_ranks]
    return ends.diff(prepend=torch.zeros(1, dtype=ends.dtype)).tolist()


SPLITS = "counts.view(num_ranks, -1).sum(1).tolist()"

SEND_SPLITS = Answers(
    solves="send_splits",
    right={
        "chunks": splits_by_chunks,
        "a loop": splits_by_a_loop,
        "differences of ends": splits_by_differences,
        "reshape": changed("view(num_ranks, -1) => reshape(num_ranks, -1)"),
        "a tuple": changed(f"return {SPLITS} => return tuple({SPLITS})"),
    },
    wrong={
        "a tensor": (changed(".sum(1).tolist() => .sum(1)"), "a list with a whole number"),
        "a list of tensors": (
            changed(f"{SPLITS} => list(counts.view(num_ranks, -1).sum(1))"),
            "the numbers are tensors",
        ),
        "dealt out in turn": (
            changed("view(num_ranks, -1).sum(1) => view(-1, num_ranks).sum(0)"),
            "a rank keeps neighbours",
        ),
        "the other dim": (changed("sum(1) => sum(0)"), "one for each rank"),
        "the counts themselves": (changed(SPLITS + " => counts.tolist()"), "one for each rank"),
        "numbers of experts": (
            changed(SPLITS + " => [len(counts) // num_ranks] * num_ranks"),
            "these are numbers of experts",
        ),
        "ends": (changed("sum(1) => sum(1).cumsum(0)"), "give their lengths"),
        "means": (
            changed("counts.view => counts.double().view", "sum(1) => mean(1)"),
            "that is the mean",
        ),
        "one expert": (
            changed("view(num_ranks, -1).sum(1) => view(num_ranks, -1)[:, 0]"),
            "one expert of each rank",
        ),
        "four ranks": (changed("view(num_ranks, -1) => view(4, -1)"), "for 2 ranks: one for each"),
        "floats": (changed("counts.view => counts.double().view"), "no whole numbers of Python"),
        "no return": (changed(f"return {SPLITS} => {SPLITS}"), "returned None"),
    },
    takes_ranks=False,
)


# ---- 24.2 the uneven all-to-all


class ByLists(torch.autograd.Function):
    """dist.all_to_all of lists of tensors."""

    @staticmethod
    def travel(rows, sent, received, group):
        gives = [part.contiguous() for part in rows.split(sent)]
        takes = [rows.new_empty(number, rows.shape[1]) for number in received]
        dist.all_to_all(takes, gives, group=group)
        return torch.cat(takes)

    @staticmethod
    def forward(ctx, rows, sent, received, group):
        ctx.back = (received, sent, group)
        return ByLists.travel(rows, sent, received, group)

    @staticmethod
    def backward(ctx, grad):
        return ByLists.travel(grad, *ctx.back), None, None, None


class IntoViews(torch.autograd.Function):
    """dist.all_to_all from views of the rows into views of the output."""

    @staticmethod
    def travel(rows, sent, received, group):
        out = rows.new_empty(sum(received), rows.shape[1])
        takes = list(out.split(received))
        dist.all_to_all(takes, list(rows.contiguous().split(sent)), group=group)
        return out

    @staticmethod
    def forward(ctx, rows, sent, received, group):
        ctx.back = (received, sent, group)
        return IntoViews.travel(rows, sent, received, group)

    @staticmethod
    def backward(ctx, grad):
        return IntoViews.travel(grad, *ctx.back), None, None, None


class ByTorch(torch.autograd.Function):
    """PyTorch's functional collective, forward and backward."""

    @staticmethod
    def forward(ctx, rows, sent, received, group):
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return all_to_all_single_autograd(rows.contiguous(), received, sent, group).clone()

    @staticmethod
    def backward(ctx, grad):
        given = grad.contiguous()
        out = all_to_all_single_autograd(given, ctx.sent, ctx.received, ctx.group)
        return out.clone(), None, None, None


SEND = "dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)"
SEND_BACK = """dist.all_to_all_single(
            out, grad.contiguous(), ctx.sent, ctx.received, group=ctx.group
        )"""
ROOM_BACK = "out = grad.new_empty(sum(ctx.sent), grad.shape[1])"
BACK = "return out, None, None, None"

EXCHANGE = Answers(
    solves="MyExchange",
    right={
        "lists of tensors": ByLists,
        "lists of views": IntoViews,
        "functional collectives": ByTorch,
        "awaited": changed(
            "group=group) => group=group, async_op=True).wait()",
            "group=ctx.group\n        ) => group=ctx.group, async_op=True\n        ).wait()",
        ),
        "zeros": changed("rows.new_empty => rows.new_zeros", "grad.new_empty => grad.new_zeros"),
        "keywords": changed(
            f"{SEND} => dist.all_to_all_single(out, rows.contiguous(), "
            "input_split_sizes=sent, output_split_sizes=received, group=group)"
        ),
    },
    wrong={
        "the same splits in backward": (
            changed(
                "ctx.sent, ctx.received, group=ctx.group => ctx.received, ctx.sent, group=ctx.group"
            ),
            "sends what it received, and receives what it sent",
        ),
        "the same splits and room in backward": (
            changed(
                "ctx.sent, ctx.received, group=ctx.group => "
                "ctx.received, ctx.sent, group=ctx.group",
                "sum(ctx.sent) => sum(ctx.received)",
            ),
            "sends what it received, and receives what it sent",
        ),
        "input before output": (
            changed("received, sent, group=group => sent, received, group=group"),
            "the sizes of the output stand before",
        ),
        "even splits": (
            changed("contiguous(), received, sent, group => contiguous(), group"),
            "equal parts along dim 0",
        ),
        "lists of pieces with gaps": (
            changed(
                f"{SEND} => dist.all_to_all(list(out.split(received)), list(rows.split(sent)), "
                "group=group)"
            ),
            "NCCL refuses it and gloo may send what lies in the gaps: pass x.contiguous() (line",
        ),
        "a tuple of pieces": (
            changed(
                f"{SEND} => dist.all_to_all(list(out.split(received)), "
                "rows.contiguous().split(sent), group=group)"
            ),
            "`input_tensor_list` was given a tuple, as `split` and `chunk` return it",
        ),
        "without the group": (changed("sent, group=group => sent"), "rank 1 waits in all_to_all"),
        "backward without the group": (
            changed(", group=ctx.group => "),
            "rank 1 waits in all_to_all",
        ),
        "the gradient stays": (
            changed(f"{SEND_BACK} => pass", f"{BACK} => return grad, None, None, None"),
            "of another size than `rows`",
        ),
        "the mean": (
            changed(f"{BACK} => return out / ctx.group.size(), None, None, None"),
            "no sum and no mean",
        ),
        "not contiguous": (changed("rows.contiguous() => rows"), "contiguous"),
        "a gradient that is not contiguous": (
            changed("grad.contiguous() => grad"),
            "contiguous",
        ),
        "one gradient": (changed(f"{BACK} => return out"), "backward gives 1 where 4"),
        "no return in forward": (changed("return out\n => pass\n"), "returned None"),
        "no return in backward": (changed(f"{BACK} => pass"), "backward gives 1 where 4"),
        "room for what is sent": (
            changed("rows.new_empty(sum(received) => rows.new_empty(sum(sent)"),
            "the sizes of the output stand before",
        ),
        "not awaited": (
            changed("sent, group=group) => sent, group=group, async_op=True)"),
            "without wait() nobody",
        ),
        "nothing is sent": (
            changed(f"{SEND} => out.zero_()"),
            "nothing was sent",
        ),
        "the splits on the class": (
            changed(
                "ctx.sent = sent => ctx.sent = received",
                "ctx.received = received => ctx.received = sent",
            ),
            "sends what it received, and receives what it sent",
        ),
        "labcode's own": (
            changed(
                f"{SEND} => return experts.exchange_rows(rows, sent, received, group)",
                "out = rows.new_empty => from labcode.parallel import experts\n"
                "        out = rows.new_empty",
            ),
            "labcode's own answer",
        ),
    },
)


# ---- 24.3 the layer


def layer_with_pieces(x, router, up, down, k, group, exchange=experts.exchange_rows):
    """Each expert's rows are picked out of what arrived; the sum by a scatter of choices."""
    p, here = group.size(), len(up)
    weights, chosen = torch.softmax(x @ router, -1).topk(k, -1)
    order = torch.sort(chosen.reshape(-1), stable=True).indices
    by_rank = torch.stack([(chosen == e).sum() for e in range(p * here)]).view(p, here)
    theirs = torch.zeros_like(by_rank)
    dist.all_to_all_single(theirs, by_rank, group=group)
    sent, received = by_rank.sum(1).tolist(), theirs.sum(1).tolist()
    arrived = exchange(x.repeat_interleave(k, 0)[order], sent, received, group)
    expert = torch.cat([torch.arange(here).repeat_interleave(row) for row in theirs])
    done = torch.zeros_like(arrived)
    for e in range(here):
        mine = (expert == e).nonzero()[:, 0]
        inside = torch.nn.functional.gelu(arrived[mine] @ up[e])
        done = done.index_copy(0, mine, inside @ down[e])
    back = exchange(done, received, sent, group)
    rows = torch.zeros(len(order), x.shape[1], dtype=x.dtype).index_copy(0, order, back)
    return (rows.view(len(x), k, -1) * weights[..., None]).sum(1)


def layer_with_exchange_of_sizes(x, router, up, down, k, group):
    """Counts gathered from all; rows in the order of choices; weights before the way there."""
    p, here = group.size(), len(up)
    weights, chosen = by_hand.route(x, router, k)
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=p * here)
    everybody = [torch.empty_like(counts) for _ in range(p)]
    dist.all_gather(everybody, counts, group=group)
    mine = slice(group.rank() * here, (group.rank() + 1) * here)
    theirs = torch.stack(everybody)[:, mine]
    sent = [int(part.sum()) for part in counts.chunk(p)]
    received = [int(row.sum()) for row in theirs]
    arrived = experts.exchange_rows(x[order // k], sent, received, group)
    pieces = arrived.split(theirs.flatten().tolist())
    results = [None] * len(pieces)
    for e in range(here):
        for source in range(p):
            piece = pieces[source * here + e]
            results[source * here + e] = torch.nn.functional.gelu(piece @ up[e]) @ down[e]
    back = experts.exchange_rows(torch.cat(results), received, sent, group)
    y = torch.zeros_like(x)
    return y.index_add(0, order // k, back * weights.flatten()[order].unsqueeze(1))


THERE = "arrived = exchange(x[order // k], sent, received, group)"
HOME = "back = exchange(done, received, sent, group)"
UNDO = "done = done[by_expert.argsort()]"
WEIGHTED = "weighted = weights.flatten()[order, None] * back"
ADD = "torch.zeros_like(x).index_add(0, order // k, weighted)"
SKIP = """if len(arrived) == 0:
        up, down = up.detach(), down.detach()
    done = apply_experts"""
ONLY_BUSY = """busy = [e for e in range(len(up)) if theirs.sum(0)[e]]
    up = up.detach() if not busy else up
    down = down.detach() if not busy else down
    done = apply_experts"""

LAYER = Answers(
    solves="expert_layer",
    right={
        "experts pick their rows": layer_with_pieces,
        "pieces, and counts gathered": layer_with_exchange_of_sizes,
        "weights by a gather": changed(
            f"{WEIGHTED} => weighted = back * weights.reshape(-1, 1)[order]"
        ),
        "an inverse by scatter": changed(
            f"{UNDO} => done = torch.empty_like(done).index_copy(0, by_expert, done)"
        ),
        "their own exchange": changed(
            "exchange(x[order => MyExchange.apply(x[order",
            "exchange(done => MyExchange.apply(done",
        ),
    },
    wrong={
        "weights before the experts": (
            changed(
                "arrived = exchange(x[order // k], => "
                "arrived = exchange(x[order // k] * weights.flatten()[order, None],",
                f"{WEIGHTED} => weighted = back",
            ),
            "behind its expert",
        ),
        "not sorted again": (
            changed("arrived[by_expert] => arrived", f"{UNDO} => pass"),
            "sorted by sender",
        ),
        "sorted again, not undone": (changed(f"{UNDO} => pass"), "sorted by sender"),
        "undone by the same permutation": (
            changed("done[by_expert.argsort()] => done[by_expert]"),
            "sorted by sender",
        ),
        "no weights": (changed(f"{WEIGHTED} => weighted = back"), "without their weights"),
        "weights as they stand": (
            changed("weights.flatten()[order, None] => weights.flatten()[:, None]"),
            "the output is wrong",
        ),
        "token order forgotten": (
            changed("index_add(0, order // k => index_add(0, torch.arange(len(order)) // k"),
            "which permutation undoes a sorting",
        ),
        "nothing travels": (
            changed(
                f"{THERE} => arrived = x[order // k]",
                f"{HOME} => back = done",
                "theirs.flatten() => counts[0].repeat(p)",
            ),
            "numbers of rows that do not fit",
        ),
        "rows do not come back": (
            changed(f"{HOME} => back = done"),
            "numbers of rows that do not fit",
        ),
        "the mean of a token's rows": (
            changed(f"return {ADD} => return {ADD} / k"),
            "0.5 times the output",
        ),
        "detached weights": (
            changed("weights.flatten() => weights.detach().flatten()"),
            "no gradient reaches the router",
        ),
        "an assignment": (
            changed(
                f"return {ADD} => return torch.zeros_like(x).index_copy(0, order // k, weighted)"
            ),
            "an assignment by index keeps one",
        ),
        "idle experts are skipped": (
            changed(f"done = apply_experts => {SKIP}"),
            "also without rows",
        ),
        "a plain all-to-all": (
            changed(
                f"{THERE} => arrived = x.new_empty(sum(received), x.shape[1]); "
                "dist.all_to_all_single(arrived, x[order // k].detach(), received, sent, "
                "group=group)"
            ),
            "expected are 2: which call cuts the graph",
        ),
        "without the group": (
            changed("theirs, counts, group=group => theirs, counts"),
            "no 4 equal parts along dim 0",
        ),
        "no minlength": (
            changed(", minlength=num_experts => "),
            "3 numbers do not make 4 rows of the same length: if they are counts",
        ),
        "splits of the sent for the received": (
            changed("received = theirs.sum(1) => received = counts.sum(1)"),
            "numbers came, for",
        ),
        "two ranks": (changed("p = group.size() => p = 4"), "in the group of ranks 0-5"),
        "labcode's own": (by_hand.expert_layer, "labcode's own answer"),
        "no return": (changed(f"return {ADD} => {ADD}"), "returned None"),
    },
)


# ---- 24.4 groups and the norm


def finish_with_averages(dense, experts, dp, ep, edp):
    """Scales first, sums afterwards; the norm from flat tensors."""
    for group, params in ((dp, dense), (edp, experts)):
        for param in params:
            param.grad.mul_(1 / dp.size())
            dist.all_reduce(param.grad, group=group)
    own = torch.cat([param.grad.flatten() for param in experts]).norm() ** 2
    dist.all_reduce(own, group=ep)
    shared = torch.cat([param.grad.flatten() for param in dense]).norm() ** 2
    return torch.sqrt(own + shared)


def finish_in_one_message(dense, experts, dp, ep, edp):
    """One all-reduce for each group."""
    for group, params in ((dp, dense), (edp, experts)):
        flat = torch.cat([param.grad.reshape(-1) for param in params]) / dp.size()
        dist.all_reduce(flat, group=group)
        for param, part in zip(params, flat.split([p.numel() for p in params])):
            param.grad = part.view_as(param).clone()
    squares = sum(param.grad.pow(2).sum() for param in experts)
    dist.all_reduce(squares, group=ep)
    return (squares + sum(param.grad.pow(2).sum() for param in dense)) ** 0.5


def finish_over_dp(dense, experts, dp, ep, edp):
    """Every rank of dp sends its share of the squares."""
    for param in dense:
        dist.all_reduce(param.grad, group=dp)
        param.grad /= dp.size()
    for param in experts:
        dist.all_reduce(param.grad, group=edp)
        param.grad /= ep.size() * edp.size()
    squares = torch.zeros(1, dtype=torch.float64)
    for param in dense:
        squares += param.grad.square().sum() / dp.size()
    for param in experts:
        squares += param.grad.square().sum() / edp.size()
    dist.all_reduce(squares, group=dp)
    return squares.sqrt().item()


def squares_before_the_sums(dense, experts, dp, ep, edp):
    """The norm of what backward has left, whatever is done afterwards."""
    of_experts = torch.zeros((), dtype=torch.float64)
    for param in experts:
        of_experts += param.grad.square().sum()
    dist.all_reduce(of_experts, group=ep)
    of_dense = sum(param.grad.square().sum() for param in dense)
    for param in dense:
        dist.all_reduce(param.grad, group=dp)
        param.grad /= dp.size()
    for param in experts:
        dist.all_reduce(param.grad, group=edp)
        param.grad /= dp.size()
    return (of_dense + of_experts).sqrt()


SUM_DENSE = "dist.all_reduce(param.grad, group=dp)"
SUM_EXPERTS = "dist.all_reduce(param.grad, group=edp)"
SUM_SQUARES = "dist.all_reduce(squares, group=ep)"
EXPERTS_LOOP = """    for param in experts:
        squares += param.grad.square().sum()
"""
DENSE_LOOP = """    for param in dense:
        squares += param.grad.square().sum()
"""

FINISH = Answers(
    solves="finish_gradients",
    right={
        "scaled first": finish_with_averages,
        "one message for each group": finish_in_one_message,
        "shares of the squares over dp": finish_over_dp,
        "awaited": changed(
            f"{SUM_DENSE} => dist.all_reduce(param.grad, group=dp, async_op=True).wait()"
        ),
    },
    wrong={
        "squares before the sums": (squares_before_the_sums, "not summed yet"),
        "divided by the replicas": (
            changed(
                f"{SUM_EXPERTS}\n        param.grad /= dp.size() => {SUM_EXPERTS}\n"
                "        param.grad /= edp.size()"
            ),
            "an expert is 2 times too long",
        ),
        "divided only where there are replicas": (
            changed(
                f"{SUM_EXPERTS}\n        param.grad /= dp.size() => if edp.size() > 1:\n"
                f"            {SUM_EXPERTS}\n            param.grad /= dp.size()"
            ),
            "an expert is 4 times too long",
        ),
        "not divided": (
            changed(f"{SUM_EXPERTS}\n        param.grad /= dp.size() => {SUM_EXPERTS}"),
            "an expert is 4 times too long",
        ),
        "dense not divided": (
            changed(f"{SUM_DENSE}\n        param.grad /= dp.size() => {SUM_DENSE}"),
            "4 times the mean over dp",
        ),
        "experts over dp": (
            changed(f"{SUM_EXPERTS} => {SUM_DENSE}"),
            "neighbours keep other experts",
        ),
        "experts over ep": (
            changed(f"{SUM_EXPERTS} => dist.all_reduce(param.grad, group=ep)"),
            "these ranks keep other experts",
        ),
        "experts not summed": (changed(f"{SUM_EXPERTS} => pass"), "lacks that of its replicas"),
        "dense not summed": (changed(f"{SUM_DENSE} => pass"), "this rank's own"),
        "dense over edp": (changed(f"{SUM_DENSE} => {SUM_EXPERTS}"), "summed over edp"),
        "without the group": (
            changed(f"{SUM_DENSE} => dist.all_reduce(param.grad)"),
            "summed over the whole job",
        ),
        "norm of this rank": (changed(f"{SUM_SQUARES} => pass"), "experts of this rank alone"),
        "norm over ep of everything": (
            changed(
                f"{EXPERTS_LOOP} => {EXPERTS_LOOP}{DENSE_LOOP}",
                f"{SUM_SQUARES}\n{DENSE_LOOP} => {SUM_SQUARES}\n",
            ),
            "once for each rank of ep",
        ),
        "norm over edp": (
            changed(f"{SUM_SQUARES} => dist.all_reduce(squares, group=edp)"),
            "in place of those of ep",
        ),
        "norm over dp": (
            changed(f"{SUM_SQUARES} => dist.all_reduce(squares, group=dp)"),
            "once for each of its replicas",
        ),
        "the square": (changed("return squares.sqrt() => return squares"), "square of the norm"),
        "only experts": (
            changed(f"{SUM_SQUARES}\n{DENSE_LOOP} => {SUM_SQUARES}\n"),
            "only the experts",
        ),
        "norms added up": (
            changed(
                "squares += param.grad.square().sum() => squares += param.grad.norm()",
                "squares.sqrt() => squares",
            ),
            "the norm is",
        ),
        "no return": (changed("return squares.sqrt() => squares.sqrt()"), "is there a `return`"),
        "labcode's own": (by_hand.finish_gradients, "labcode's own answer"),
    },
)


# ---- 24.5 the clinic

DIAGNOSES = Answers(
    solves="diagnoses",
    right={
        "another order": {"C": "skipped", "B": "detached", "A": "group"},
        "small letters and large": {"a": "Group", "b": "DETACHED", "c": "skipped"},
        "with a blank": {"A": "group", "B": "detached", "C": "skipped "},
    },
    wrong={
        "A and C exchanged": ({"A": "skipped", "B": "detached", "C": "group"}, "nobody lacks one"),
        "B and C exchanged": (
            {"A": "group", "B": "skipped", "C": "detached"},
            "does the load matter",
        ),
        "the norm": ({"A": "norm", "B": "detached", "C": "skipped"}, "changes no gradient"),
        "the order": ({"A": "group", "B": "order", "C": "skipped"}, "make the loss wrong"),
        "the splits": ({"A": "group", "B": "detached", "C": "splits"}, "not come to its end"),
        "one is missing": ({"A": "group", "B": "detached"}, "C has no diagnosis"),
        "free words": (
            {"A": "divided by edp", "B": "detached", "C": "skipped"},
            "there is no 'divided by edp'",
        ),
        "a list": (["group", "detached", "skipped"], "give a dict"),
    },
    takes_ranks=False,
)

ANSWERS = {
    "24.1": SEND_SPLITS,
    "24.2": EXCHANGE,
    "24.3": LAYER,
    "24.4": FINISH,
    "24.5": DIAGNOSES,
}
