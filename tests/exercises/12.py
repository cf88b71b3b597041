"""Answers to the exercises of lesson 12, pipeline parallelism."""

import functools

import torch
import torch.distributed as dist
from answers import Answers, changed

from course.exercises import l12
from labcode.parallel.pipeline import Pipeline
from labcode.perf.pipeline import StageTimes, simulate
from labcode.schedules import Action, make_plan, schedule

# ---- 12.1 GPipe as data


def gpipe_in_two_loops(rank, m):
    order = []
    for i in range(m):
        order.append(Action("F", rank, i))
    for i in range(m):
        order.append(Action("B", rank, i))
    return order


BOTH = "forwards + backwards => "  # what the solution returns
IN_REVERSE = (
    'Action("B", rank, i) for i in range(m) => Action("B", rank, i) for i in range(m)[::-1]'
)

GPIPE = Answers(
    solves="gpipe_order",
    takes_ranks=False,
    right={
        "two loops": gpipe_in_two_loops,
        "backwards from the last": changed(IN_REVERSE),
        "one comprehension": changed(
            f"{BOTH}[Action(kind, rank, i) for kind in 'FB' for i in range(m)]"
        ),
        "parsed": changed(
            f"{BOTH}[Action.parse(f'{{rank}}{{kind}}{{i}}') for kind in 'FB' for i in range(m)]"
        ),
    },
    wrong={
        "F and B in turn": (
            changed(f"{BOTH}[Action(kind, rank, i) for i in range(m) for kind in 'FB']"),
            "comes before the last forward",
        ),
        "always stage 0": (changed("rank, i => 0, i"), "the stage with its own number"),
        "no backwards": (changed(f"{BOTH}forwards"), "no backward of micro-batch 0"),
        "counts from 1": (changed("rank, i => rank, i + 1"), "no forward of micro-batch 0"),
        "one too many": (changed("range(m) => range(m + 1)"), "the last one is micro-batch"),
        "twice": (changed(f"{BOTH}forwards + backwards + forwards[:1]"), "2 times"),
        "text": (
            changed(f"{BOTH}[str(one) for one in forwards + backwards]"),
            "the entry '0F0', which is no Action",
        ),
        "all ranks at once": (
            changed(f"{BOTH}{{number: forwards + backwards for number in range(4)}}"),
            "give a list of Action",
        ),
        "labcode's own": (changed(f"{BOTH}schedule('gpipe', 4, m)[rank]"), "write yours"),
        "halves of a backward": (changed('"B" => "I"'), "the kinds here are F and B"),
        "neighbours go different ways": (
            changed("return forwards => if rank % 2: backwards.reverse()\n    return forwards"),
            "in the same order",
        ),
    },
)


# ---- 12.2 the runner


def run_in_functions(actions, stage, loss, inputs, targets, group):
    """Cut into functions, with messages of P2POp and tags."""
    rank = group.rank()
    p = group.size()
    members = dist.get_process_group_ranks(group)
    inputs_of = {}
    outputs_of = {}
    works = []

    def receive(place, number):
        tensor = torch.zeros_like(inputs[number])
        operation = dist.P2POp(dist.irecv, tensor, members[place], group)
        for work in dist.batch_isend_irecv([operation]):
            work.wait()
        return tensor

    def send(tensor, place):
        operation = dist.P2POp(dist.isend, tensor.contiguous(), members[place], group)
        works.extend(dist.batch_isend_irecv([operation]))

    def forward(number):
        x = inputs[number].clone() if rank == 0 else receive(rank - 1, number)
        x.requires_grad = True
        y = stage(x)
        inputs_of[number] = x
        outputs_of[number] = y
        if rank < p - 1:
            send(y.detach().clone(), rank + 1)

    def backward(number):
        y = outputs_of.pop(number)
        if rank == p - 1:
            (loss(y, targets[number]) * (1 / len(targets))).backward()
        else:
            torch.autograd.backward(y, receive(rank + 1, number))
        if rank > 0:
            send(inputs_of[number].grad, rank - 1)
        del inputs_of[number]

    for action in actions:
        if action.kind == "F":
            forward(action.microbatch)
        elif action.kind == "B":
            backward(action.microbatch)
    for work in works:
        work.wait()


def run_with_autograd_grad(actions, stage, loss, inputs, targets, group):
    """A beginner's way round `.grad`: asks for the gradients by name and adds them by hand."""
    rank = dist.get_rank(group)
    size = dist.get_world_size(group)
    params = list(stage.parameters())
    xs, ys, messages = {}, {}, []
    for action in actions:
        i = action.microbatch
        if action.kind == "F":
            if rank == 0:
                x = inputs[i].detach().requires_grad_()
            else:
                x = torch.zeros(inputs[i].shape, dtype=inputs[i].dtype)
                dist.irecv(x, group=group, group_src=rank - 1).wait()
                x.requires_grad_(True)
            xs[i], ys[i] = x, stage(x)
            if rank != size - 1:
                messages.append(dist.isend(ys[i].data, group=group, group_dst=rank + 1))
        if action.kind == "B":
            y = ys.pop(i)
            if rank == size - 1:
                start, gradient = loss(y, targets[i]) / len(inputs), None
            else:
                start, gradient = y, torch.zeros_like(y)
                dist.recv(gradient, group=group, group_src=rank + 1)
            grad_x, *grads = torch.autograd.grad(start, [xs.pop(i), *params], gradient)
            for param, grad in zip(params, grads):
                param.grad = grad if param.grad is None else param.grad + grad
            if rank != 0:
                messages.append(dist.isend(grad_x, group=group, group_dst=rank - 1))
    for message in messages:
        message.wait()


def run_with_the_library(actions, stage, loss, inputs, targets, group):
    p = group.size()
    plan = make_plan(schedule("gpipe", p, len(inputs)), p, len(inputs))
    own = {group.rank(): lambda x, given: stage(given if x is None else x)}
    Pipeline(own, plan, group, loss, torch.empty_like).step(inputs, targets)


RECV_X = "dist.recv(x, group=group, group_src=rank - 1)"
RECV_GRADIENT = "dist.recv(gradient, group=group, group_src=rank + 1)"
INTO_FLAT = """\
flat = torch.empty({0}.numel(), dtype={0}.dtype)
                dist.irecv(flat, group=group, group_src={1}).wait()
                {0} = flat.view({0}.shape)"""
SEND_Y = "sending.append(dist.isend(message, group=group, group_dst=rank + 1))"
SEND_GRADIENT = "sending.append(dist.isend(message, group=group, group_dst=rank - 1))"
IN_WORLD = (  # messages without the group; `here` is this rank in the world
    "rank = dist.get_rank(group) => here = dist.get_rank()\n    rank = dist.get_rank(group)",
    "group=group, group_src=rank - => src=here -",
    "group=group, group_src=rank + => src=here +",
    "group=group, group_dst=rank + => dst=here +",
    "group=group, group_dst=rank - => dst=here -",
)

RUNNER = Answers(
    solves="run_actions",
    right={
        "in functions, with P2POp": run_in_functions,
        "torch.autograd.grad": run_with_autograd_grad,
        "irecv into flat tensors": changed(
            f"{RECV_X} => {INTO_FLAT.format('x', 'rank - 1')}",
            f"{RECV_GRADIENT} => {INTO_FLAT.format('gradient', 'rank + 1')}",
        ),
    },
    wrong={
        "keeps it all": (
            changed("kept.pop(i) => kept[i]"),
            "rank 0 still holds what the F of 2 micro-batches has kept",
        ),
        "requires_grad_ forgotten": (
            changed("x.requires_grad_() => pass"),
            "does not require a gradient",
        ),
        "the 1/m forgotten": (changed(" / len(inputs) => "), "gradients 4 times as large"),
        "divided by the ranks": (changed("len(inputs) => 4"), "0.25 times as large"),
        "handles of sends dropped": (changed("sending.append => id"), "a send was dropped"),
        "sends not waited for": (changed("handle.wait() => pass"), "a send was dropped"),
        "sends twice": (
            changed(f"{SEND_Y} => {SEND_Y}\n                {SEND_Y}"),
            "it sends more messages than",
        ),
        "x not waited for": (changed("recv(x => irecv(x"), "nobody waited for a receive"),
        "buffer of another dtype": (
            changed("empty_like(inputs[i]) => empty_like(inputs[i], dtype=torch.float32)"),
            "the buffer of a receive is float32 [4, 16], and the message float64 [4, 16]",
        ),
        "buffer of another shape": (
            changed("empty_like(inputs[i]) => empty_like(inputs[i][0])"),
            "the buffer of a receive is float64 [16], and the message float64 [4, 16]",
        ),
        "one buffer for all": (
            changed(
                "kept = {} => buffer = torch.empty_like(inputs[0])\n    kept = {}",
                "torch.empty_like(inputs[i]) => buffer.detach()",
            ),
            "x is no longer what its F was given",
        ),
        "the last rank is 3": (
            changed("dist.get_world_size(group) - 1 => 3"),
            "is every rank counted within",
        ),
        "send that waits": (
            changed(
                f"{SEND_Y} => dist.send(message, group=group, group_dst=rank + 1)",
                f"{SEND_GRADIENT} => dist.send(x.grad, group=group, group_dst=rank - 1)",
            ),
            "with GPipe it worked",
        ),
        "the world's rank": (
            changed("get_rank(group) => get_rank()", "get_world_size(group) => get_world_size()"),
            "is every rank counted within",
        ),
        "sends x back": (
            changed("x.grad.contiguous() => x.detach()"),
            "the rank behind it has the right",
        ),
        "the oldest forward first": (
            changed("kept.pop(i) => kept.pop(next(iter(kept)))"),
            "backward went through",
        ),
        "the newest forward first": (changed("pop(i) => popitem()[1]"), "backward went through"),
        "receives into inputs": (
            changed(
                "torch.empty_like(inputs[i]) => inputs[i]",
                "x.requires_grad_() => x = x.clone().requires_grad_()",
            ),
            "has changed inputs[0]",
        ),
        "works on its own inputs": (
            changed("x.requires_grad_() => x = inputs[i].clone().requires_grad_()"),
            "works on the inputs of the batch",
        ),
        "starts backward with ones": (
            changed(f"{RECV_GRADIENT} => {RECV_GRADIENT}\n                gradient.fill_(1)"),
            "which output is it the gradient of",
        ),
        "zeroes the gradients": (
            changed("y.backward => stage.zero_grad()\n            y.backward"),
            "only the gradient of micro-batch",
        ),
        "a broadcast at the end": (
            changed("for handle => dist.broadcast(y, group=group, group_src=0)\n    for handle"),
            "talks to all ranks",
        ),
        "labcode's Pipeline": (run_with_the_library, "write the sends and receives yourself"),
        "no backward": (changed('kind == "B" => kind == "W"'), "has no gradients"),
        "receives from the last": (
            changed(
                "if rank > 0:\n                x = => if True:\n                x =",
                "group_src=rank - 1 => group_src=(rank - 1) % (last + 1)",
            ),
            "messages do not meet",
        ),
        "wipes what stood in .grad": (
            changed("kept = {} => stage.zero_grad()\n    kept = {}"),
            "what stood in .grad is gone",
        ),
        "divides .grad at the end": (
            changed(
                " / len(inputs) => ",
                "for handle => for param in stage.parameters():\n"
                "        param.grad /= len(inputs)\n    for handle",
            ),
            "what stood in .grad is 0.3333 times as large",
        ),
        "asks for a gradient of the data": (
            changed("x = inputs[i] => x = inputs[i].requires_grad_(rank == 0)"),
            "inputs[0] requires a gradient on rank 0",
        ),
        "waits at once and again at the end": (
            changed(f"{SEND_Y} => {SEND_Y}\n                sending[-1].wait()"),
            "the handle of a send was waited for twice",
        ),
        "receives in the world": (changed(*IN_WORLD[:3]), "does not go through `group`"),
        "no message in the group": (changed(*IN_WORLD), "does not go through `group`"),
        "F without autograd": (
            changed("y = stage(x) => with torch.no_grad():\n                y = stage(x)"),
            "the stage ran without autograd",
        ),
        "y detached before B": (
            changed("y = stage(x) => y = stage(x).detach()"),
            "backward was started from a tensor that has no graph",
        ),
        "the first rank sends None": (
            changed(
                "if rank > 0:\n                message => if True:\n                message",
                "group_dst=rank - 1 => group_dst=max(rank - 1, 0)",
            ),
            "does another rank wait for it",
        ),
        "x is no leaf": (
            changed("x.requires_grad_() => x = x.requires_grad_().clone()"),
            "was requires_grad_ called on this very x",
        ),
        "runs the stage in B too": (
            changed("x, y = kept.pop(i) => x, y = kept.pop(i)\n            y = stage(x)"),
            "was called more than",
        ),
        "does nothing": (changed("in actions: => in []:"), "ran its stage 0 times"),
        "sends the graph as well": (
            changed("y.detach().contiguous() => y"),
            "is sent together with its graph, and the handle of its message keeps both",
        ),
    },
)


# ---- 12.3 1F1B as data


def order_with_counters(rank, p, m):
    """Counts what has been done, action by action."""
    order = []
    done = {"F": 0, "B": 0}
    while done["B"] < m:
        ahead = done["F"] - done["B"]
        kind = "F" if done["F"] < m and ahead < p - rank else "B"
        order.append(Action(kind, rank, done[kind]))
        done[kind] += 1
    return order


def order_backward_first(rank, p, m):
    """A warm-up of one more, then B and F in turn: the same list."""
    warmup = min(p - rank, m)
    order = [Action("F", rank, i) for i in range(warmup)]
    for i in range(m):
        order.append(Action("B", rank, i))
        if warmup + i < m:
            order.append(Action("F", rank, warmup + i))
    return order


ORDER = "return order => return "
APPEND_F = "order.append(forwards[i])"
APPEND_B = "order.append(backwards[i - warmup])"

ONE_F_ONE_B = Answers(
    solves="one_f_one_b_order",
    right={
        "two lists": changed(
            "for i in range(warmup, m): => for pair in zip(forwards[warmup:], backwards):",
            f"{APPEND_F}\n        {APPEND_B} => order += pair",
        ),
        "counters": order_with_counters,
        "B before F": order_backward_first,
    },
    wrong={
        "labcode's own": (changed(f"{ORDER}schedule('1f1b', p, m)[rank]"), "write yours"),
        "GPipe": (
            changed(f"{ORDER}forwards + backwards"),
            "2 are enough: its warm-up is too long",
        ),
        "warm-up of all but one": (changed("p - 1 - rank => p - 1"), "its warm-up is too long"),
        "the last rank has a warm-up of one more pair": (
            changed(
                "return order => if rank == p - 1 and m > 2:\n"
                "        order[3], order[4] = order[4], order[3]\n    return order"
            ),
            "1 is enough: after the warm-up each forward is followed by a backward",
        ),
        "a loop without end": (
            changed("for i in range(warmup, m): => i = warmup\n    while i < m:"),
            "loop",
        ),
        "one warm-up too many": (changed("p - 1 - rank => p - rank"), "its warm-up is too long"),
        "no warm-up": (changed("min(p - 1 - rank, m) => 0"), "how many ranks are behind it"),
        "warm-up of the other end": (changed("p - 1 - rank => rank"), "cannot start"),
        "backward first": (
            changed(f"{APPEND_F}\n        {APPEND_B} => {APPEND_B}\n        {APPEND_F}"),
            "cannot start",
        ),
        "last backward forgotten": (changed(f"{ORDER}order[:-1]"), "no backward of micro-batch"),
        "cool-down forgotten": (
            changed("order += backwards[m - warmup:] => pass"),
            "no backward of micro-batch",
        ),
        "backwards reversed": (changed(IN_REVERSE), "the first that goes back"),
        "cool-down reversed": (
            changed("order += backwards[m - warmup:] => order += backwards[m - warmup:][::-1]"),
            "the first that goes back",
        ),
        "text": (changed(f"{ORDER}[str(one) for one in order]"), "give a list of Action"),
        "all ranks at once": (
            changed(f"{ORDER}{{number: order for number in range(p)}}"),
            "give a list of Action",
        ),
        "always stage 0": (changed("rank, i => 0, i"), "the stage with its own number"),
        "backwards in front of the last forwards": (
            changed(f"{ORDER}sorted(order, key=lambda one: (one.microbatch, one.kind == 'B'))"),
            "how many ranks are behind it",
        ),
    },
)


# ---- 12.4 the weight's half put off


class WithPartial(torch.autograd.Function):
    """The weight's half is a function of its own."""

    @staticmethod
    def forward(ctx, x, weight, later):
        ctx.save_for_backward(x)
        ctx.weight = weight
        ctx.later = later
        return torch.matmul(x, weight.transpose(0, 1))

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        ctx.later.append(functools.partial(add_weight_gradient, ctx.weight, x, grad))
        return grad.matmul(ctx.weight.data), None, None


def add_weight_gradient(weight, x, grad):
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    rows = x.view(-1, x.shape[-1])
    weight.grad += grad.reshape(rows.shape[0], -1).t().mm(rows)


APPEND = "ctx.later.append(weight_half) => "
PRODUCT = "grad.flatten(0, -2).T @ x.flatten(0, -2)"
COMPUTE = f"grad_weight = {PRODUCT}"
WITHOUT_A_CASE = """\
            if param.grad is None:
                param.grad = grad_weight
            else:
                param.grad += grad_weight
 =>             param.grad """

SPLIT = Answers(
    solves="SplitLinear",
    takes_ranks=False,
    right={
        "einsum": changed(
            "return x @ weight.T => return torch.nn.functional.linear(x, weight)",
            f"{PRODUCT} => torch.einsum('bo,bi->oi', grad.flatten(0, -2), x.flatten(0, -2))",
            "return grad @ weight => return torch.einsum('...o,oi->...i', grad, weight)",
        ),
        "partial": WithPartial,
    },
    wrong={
        "put there by forward": (
            changed(
                "ctx.later = later => later.append(lambda: ctx.work())",
                f"{APPEND}ctx.work = weight_half",
            ),
            "it is backward that appends",
        ),
        "dA summed over the first dim": (
            changed(f"{PRODUCT} => (grad.mT @ x).sum(0)"),
            "any number of leading dims",
        ),
        "added to None": (
            changed(f"{WITHOUT_A_CASE}+= grad_weight"),
            "finds None in weight.grad",
        ),
        "dA at once": (changed(f"{APPEND}weight_half()"), "has to wait in `later`"),
        "dA returned": (
            changed(
                f"{APPEND}pass", f"return grad @ weight, None => return grad @ weight, {PRODUCT}"
            ),
            "has to wait in `later`",
        ),
        "the function returned": (
            changed("return grad @ weight, None, => return grad @ weight, weight_half,"),
            "backward returns a function",
        ),
        "computed early": (
            changed(
                f"            {COMPUTE}\n => ",
                f"        def weight_half =>         {COMPUTE}\n\n        def weight_half",
            ),
            "multiplies twice",
        ),
        "nothing in later": (changed(f"{APPEND}pass"), "`later` is empty"),
        "a tensor in later": (changed(f"{APPEND}ctx.later.append(grad)"), "put a function there"),
        "ctx asked when it is called": (
            changed(f"{COMPUTE} => x, _ = ctx.saved_tensors\n            {COMPUTE}"),
            "ctx gives them only while backward runs",
        ),
        "the gradient zeroed": (
            changed(
                "return grad @ weight => grad_x = grad @ weight\n"
                "        grad.zero_()\n        return grad_x"
            ),
            "has changed the gradient that it was given",
        ),
        "twice in later": (
            changed(f"{APPEND}ctx.later += [weight_half, weight_half]"),
            "2 entries",
        ),
        "overwritten": (
            changed(f"{WITHOUT_A_CASE}= grad_weight"),
            "has replaced the gradient",
        ),
        "the second one lost": (
            changed("param.grad += grad_weight => pass"),
            "left weight.grad as it was",
        ),
        "a matrix for each sample": (
            changed(f"{PRODUCT} => grad.mT @ x"),
            "what becomes of the leading dims",
        ),
        "transposed": (
            changed(f"{PRODUCT} => x.flatten(0, -2).T @ grad.flatten(0, -2)"),
            "which of the two factors is transposed",
        ),
        "a mean": (
            changed(f"{PRODUCT} => {PRODUCT} / x[..., 0].numel()"),
            "wrong values, for x [2, 5, 7]",
        ),
        "no dx": (changed("return grad @ weight, => return None,"), "x has no gradient"),
        "dx doubled": (
            changed("return grad @ weight => return 2 * grad @ weight"),
            "dx has the right shape",
        ),
        "forward without transpose": (changed("x @ weight.T => x @ weight"), "shapes"),
    },
)


# ---- 12.5 choose


def best_with_refusals(p, m, stage_s, message_s, most):
    """Tries everything and lets `schedule` refuse."""
    results = {}
    for name, v in [*l12.CANDIDATES]:
        try:
            actions = schedule(name, v * p, m, p)
        except ValueError:
            continue
        times = [stage_s.forward_s / v, stage_s.input_s / v, stage_s.weight_s / v]
        line = simulate(actions, [StageTimes(*times)] * (v * p), message_s=message_s)
        peaks = [line.peak_microbatches(rank) for rank in range(p)]
        if max(peaks) <= most * v:
            results[name, v] = line.total_s
    return min(results, key=results.get)


IN_A_LIST = (
    "best = None => fitting = []",
    "best = (name, v) => fitting.append((found.total_s, name, v))",
    "return best => return min(fitting)[1:]",
)
SLOWER = "another candidate that fits takes"

CHOOSE = Answers(
    solves="choose",
    takes_ranks=False,
    right={
        "a list and min": changed(*IN_A_LIST, " and found.total_s < best_s => "),
        "refusals caught": best_with_refusals,
        "as a list": changed("return best => return list(best)"),
    },
    wrong={
        "times not divided by v": (changed("_s / v => _s"), SLOWER),
        "stages counted as ranks": (
            changed("peak_microbatches() / v => peak_microbatches()"),
            "a stage as 1/v of its rank, in time and in memory",
        ),
        "memory ignored": (
            changed("found.peak_microbatches() / v <= most and => "),
            "there is room for 4",
        ),
        "messages ignored": (changed(", message_s=message_s => "), SLOWER),
        "m not looked at": (changed("if name => if False and name"), "to be a multiple of"),
        "times not looked at": (
            changed(
                "stage_s.forward_s => 0.03", "stage_s.input_s => 0.03", "stage_s.weight_s => 0.03"
            ),
            SLOWER,
        ),
        "I in place of W": (changed("stage_s.weight_s => stage_s.input_s"), SLOWER),
        "W in place of I": (changed("stage_s.input_s => stage_s.weight_s"), SLOWER),
        "F in place of I": (changed("stage_s.input_s => stage_s.forward_s"), SLOWER),
        "F in place of W": (changed("stage_s.weight_s => stage_s.forward_s"), SLOWER),
        "always four ranks": (
            changed("best = None => p = 4\n    best = None"),
            "there is room for 9.6",
        ),
        "strictly below most": (
            changed("<= most => < most", "return best => return best[0], best[1]"),
            "`at most` includes the limit itself",
        ),
        "strictly below most, in a list": (
            changed(*IN_A_LIST, "<= most and found.total_s < best_s => < most"),
            "`at most` includes the limit itself",
        ),
        "nothing returned": (changed("return best => pass"), "is there a `return`"),
        "always 1F1B": (changed("return best => return '1f1b', 1"), SLOWER),
        "always interleaved": (
            changed("return best => return 'interleaved', 2"),
            "there is room for 4",
        ),
        "only the name": (changed("return best => return best[0]"), "return (name, v)"),
        "a candidate that is none": (
            changed("return best => return 'interleaved', 8"),
            "none of the candidates",
        ),
    },
)

ANSWERS = {"12.1": GPIPE, "12.2": RUNNER, "12.3": ONE_F_ONE_B, "12.4": SPLIT, "12.5": CHOOSE}
