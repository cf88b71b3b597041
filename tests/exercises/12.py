"""Answers to the exercises of lesson 12, pipeline parallelism."""

import functools

import torch
import torch.distributed as dist
from answers import Answers

from labcode.parallel.pipeline import Pipeline
from labcode.perf.pipeline import StageTimes, simulate
from labcode.schedules import Action, make_plan, schedule
from labcode.teach.exercises import l12

# ---- 12.1 GPipe as data


def gpipe_in_two_loops(rank, m):
    order = []
    for i in range(m):
        order.append(Action("F", rank, i))
    for i in range(m):
        order.append(Action("B", rank, i))
    return order


def gpipe_as_the_paper_draws_it(rank, m):
    forwards = [Action("F", rank, i) for i in range(m)]
    return forwards + [Action("B", rank, i) for i in reversed(range(m))]


def gpipe_over_kinds(rank, m):
    return [Action(kind, rank, i) for kind in "FB" for i in range(m)]


def gpipe_back_to_front_on_odd_ranks(rank, m):
    order = gpipe_in_two_loops(rank, m)
    if rank % 2:
        order[m:] = reversed(order[m:])
    return order


GPIPE = Answers(
    check=lambda answer, ranks: l12.gpipe(answer),
    right={
        "two loops": gpipe_in_two_loops,
        "backwards from the last": gpipe_as_the_paper_draws_it,
        "one comprehension": gpipe_over_kinds,
        "parsed": lambda rank, m: [
            Action.parse(f"{rank}{kind}{i}") for kind in "FB" for i in range(m)
        ],
    },
    wrong={
        "F and B in turn": (
            lambda rank, m: [Action(kind, rank, i) for i in range(m) for kind in "FB"],
            "comes before the last forward",
        ),
        "always stage 0": (
            lambda rank, m: [Action(kind, 0, i) for kind in "FB" for i in range(m)],
            "the stage with its own number",
        ),
        "no backwards": (
            lambda rank, m: [Action("F", rank, i) for i in range(m)],
            "no backward of micro-batch 0",
        ),
        "counts from 1": (
            lambda rank, m: [Action(kind, rank, i + 1) for kind in "FB" for i in range(m)],
            "no forward of micro-batch 0",
        ),
        "one too many": (
            lambda rank, m: [Action(kind, rank, i) for kind in "FB" for i in range(m + 1)],
            "the last one is micro-batch",
        ),
        "twice": (
            lambda rank, m: gpipe_in_two_loops(rank, m) + gpipe_in_two_loops(rank, m)[:1],
            "2 times",
        ),
        "text": (
            lambda rank, m: [f"{rank}{kind}{i}" for kind in "FB" for i in range(m)],
            "give a list of Action",
        ),
        "all ranks at once": (
            lambda rank, m: {number: gpipe_in_two_loops(number, m) for number in range(4)},
            "give a list of Action",
        ),
        "labcode's own": (lambda rank, m: schedule("gpipe", 4, m)[rank], "write yours"),
        "labcode's own, all ranks": (lambda rank, m: schedule("gpipe", 4, m), "write yours"),
        "stage and micro-batch exchanged": (
            lambda rank, m: [Action(kind, i, rank) for kind in "FB" for i in range(m)],
            "the stage with its own number",
        ),
        "halves of a backward": (
            lambda rank, m: [Action(kind, rank, i) for kind in "FI" for i in range(m)],
            "the kinds here are F and B",
        ),
        "neighbours go different ways": (
            gpipe_back_to_front_on_odd_ranks,
            "in the same order",
        ),
    },
)


# ---- 12.2 the runner


def run_plainly(
    actions,
    stage,
    loss,
    inputs,
    targets,
    group,
    *,
    ask=True,
    mean=True,
    wait=False,
    in_world=False,
    send_back="x",
    take="number",
    into_inputs=False,
    reads_inputs=False,
    start_gradient=True,
    zeroes=False,
    detour=False,
    keep_handles=True,
    wait_at_end=True,
    wait_for_x=True,
    wait_for_gradient=True,
    dtype=None,
    shape=None,
    reuse=False,
    divide_by=None,
    fixed_last=False,
    twice=False,
    wipes=False,
    divides_grads=False,
    asks_inputs=False,
    waits_twice=False,
    without_group=(),
    without_autograd=False,
    detaches=False,
    first_sends=False,
    no_leaf=False,
):
    """The runner of the lesson, or one with a mistake."""
    chosen = None if in_world else group
    rank = dist.get_rank(chosen)
    last = 3 if fixed_last else dist.get_world_size(chosen) - 1
    kept = {}
    sending = []
    one_buffer = torch.empty_like(inputs[0])

    def send(tensor, to):
        if "send" in without_group:
            sending.append(dist.isend(tensor, dst=dist.get_rank() + to - rank))
        elif waits_twice:
            sending.append(dist.isend(tensor, group=group, group_dst=to))
            sending[-1].wait()
        elif wait:
            dist.send(tensor, group=group, group_dst=to)
        elif twice:
            sending.append(dist.isend(tensor, group=group, group_dst=to))
            sending.append(dist.isend(tensor, group=group, group_dst=to))
        elif keep_handles:
            sending.append(dist.isend(tensor, group=group, group_dst=to))
        else:
            dist.isend(tensor, group=group, group_dst=to)

    def receive(tensor, place, waits):
        if "recv" in without_group:
            dist.recv(tensor, src=dist.get_rank() + place - rank)
        elif waits:
            dist.recv(tensor, group=group, group_src=place)
        else:
            dist.irecv(tensor, group=group, group_src=place)

    if wipes:
        stage.zero_grad()
    for kind, _, i in actions:
        if kind == "F":
            x = inputs[i].requires_grad_() if asks_inputs and rank == 0 else inputs[i]
            if rank > 0:
                buffer = inputs[i] if into_inputs else torch.empty_like(inputs[i], dtype=dtype)
                if shape is not None:
                    buffer = torch.empty(shape, dtype=buffer.dtype)
                if reuse:
                    buffer = one_buffer.detach()
                receive(buffer, rank - 1, wait_for_x)
                x = inputs[i].clone() if reads_inputs else buffer
                if ask:
                    x = x.clone() if into_inputs else x
                    x.requires_grad_()
                    x = x.clone() if no_leaf else x
            with torch.set_grad_enabled(not without_autograd):
                y = stage(x)
            if detaches:
                y = y.detach()
            if rank == last:
                y = loss(y, targets[i])
                if mean and not divides_grads:
                    y = y / (divide_by or len(inputs))
            else:
                send(y.detach(), rank + 1)
            kept[i] = (x, y)
        else:
            number = i
            if take == "first":
                number = next(iter(kept))
            elif take == "last":
                number = list(kept)[-1]
            x, y = kept.pop(number)
            if zeroes:
                stage.zero_grad()
            if rank == last:
                y.backward()
            else:
                gradient = torch.empty_like(y)
                receive(gradient, rank + 1, wait_for_gradient)
                y.backward(gradient if start_gradient else torch.ones_like(y))
            if rank > 0 or first_sends:
                back = {"x": x.grad, "value": x.detach(), "zeros": torch.zeros_like(x)}
                send(back[send_back], max(rank - 1, 0))
    if divides_grads:
        for param in stage.parameters():
            param.grad /= len(inputs)
    if detour:
        dist.broadcast(torch.zeros(1), group=group, group_src=0)
    if wait_at_end:
        for work in sending:
            work.wait()


def run_with_mistake(**mistake):
    return functools.partial(run_plainly, **mistake)


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
        y = outputs_of[number]
        if rank == p - 1:
            (loss(y, targets[number]) * (1 / len(targets))).backward()
        else:
            torch.autograd.backward(y, receive(rank + 1, number))
        if rank > 0:
            send(inputs_of[number].grad, rank - 1)

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
            if rank == size - 1:
                start, gradient = loss(ys[i], targets[i]) / len(inputs), None
            else:
                start, gradient = ys[i], torch.zeros_like(ys[i])
                dist.recv(gradient, group=group, group_src=rank + 1)
            grad_x, *grads = torch.autograd.grad(start, [xs[i], *params], gradient)
            for param, grad in zip(params, grads):
                param.grad = grad if param.grad is None else param.grad + grad
            if rank != 0:
                messages.append(dist.isend(grad_x, group=group, group_dst=rank - 1))
    for message in messages:
        message.wait()


def run_with_irecv(actions, stage, loss, inputs, targets, group):
    """Receives into flat tensors, and waits at once."""
    rank = group.rank()
    last = group.size() - 1
    graphs = {}
    handles = []

    def take(place, like):
        flat = torch.empty(like.numel(), dtype=like.dtype)
        handle = dist.irecv(flat, group=group, group_src=place)
        handle.wait()
        return flat.view(like.shape)

    for kind, _, i in actions:
        if kind == "F":
            x = (take(rank - 1, inputs[i]) if rank else inputs[i].clone()).requires_grad_()
            y = stage(x)
            if rank < last:
                handles.append(dist.isend(y.detach(), group=group, group_dst=rank + 1))
            graphs[i] = x, y
        else:
            x, y = graphs[i]
            if rank == last:
                loss(y, targets[i]).div(len(targets)).backward()
            else:
                y.backward(take(rank + 1, y))
            if rank:
                handles.append(dist.isend(x.grad, group=group, group_dst=rank - 1))
    while handles:
        handles.pop().wait()


def run_with_the_library(actions, stage, loss, inputs, targets, group):
    p = group.size()
    plan = make_plan(schedule("gpipe", p, len(inputs)), p, len(inputs))
    own = {group.rank(): lambda x, given: stage(given if x is None else x)}
    Pipeline(own, plan, group, loss, torch.empty_like).step(inputs, targets)


def run_forwards_alone(actions, stage, loss, inputs, targets, group):
    run_plainly([one for one in actions if one.kind == "F"], stage, loss, inputs, targets, group)


def run_without_neighbours(actions, stage, loss, inputs, targets, group):
    """Every rank works alone on the whole batch."""
    for x, y in zip(inputs, targets):
        (loss(stage(x.clone().requires_grad_()), y) / len(inputs)).backward()


def run_from_the_last(actions, stage, loss, inputs, targets, group):
    """The first rank too receives from the rank before it, which is the last one."""
    rank, p = group.rank(), group.size()
    for one in actions:
        x = torch.empty_like(inputs[one.microbatch])
        dist.recv(x, group=group, group_src=(rank - 1) % p)


def run_stage_again(actions, stage, loss, inputs, targets, group):
    """Calls the stage in B once more."""
    for one in actions:
        stage(inputs[one.microbatch].clone().requires_grad_())


RUNNER = Answers(
    check=l12.runner,
    right={
        "as in the lesson": run_plainly,
        "in functions, with P2POp": run_in_functions,
        "torch.autograd.grad": run_with_autograd_grad,
        "irecv into flat tensors": run_with_irecv,
    },
    wrong={
        "requires_grad_ forgotten": (
            run_with_mistake(ask=False),
            "does not require a gradient",
        ),
        "the 1/m forgotten": (run_with_mistake(mean=False), "gradients 4 times as large"),
        "divided by a fixed 8": (run_with_mistake(divide_by=8), "0.125 times as large"),
        "divided by the ranks": (run_with_mistake(divide_by=4), "0.25 times as large"),
        "handles of sends dropped": (
            run_with_mistake(keep_handles=False),
            "a send was dropped before it had left",
        ),
        "sends not waited for": (
            run_with_mistake(wait_at_end=False),
            "a send was dropped before it had left",
        ),
        "sends twice": (run_with_mistake(twice=True), "it sends more messages than"),
        "x not waited for": (run_with_mistake(wait_for_x=False), "nobody waited for a receive"),
        "gradient not waited for": (
            run_with_mistake(wait_for_gradient=False),
            "nobody waited for a receive",
        ),
        "buffer of another dtype": (
            run_with_mistake(dtype=torch.float32),
            "the buffer of a receive is float32 [4, 16], and the message float64 [4, 16]",
        ),
        "buffer of another shape": (
            run_with_mistake(shape=(16,)),
            "the buffer of a receive is float64 [16], and the message float64 [4, 16]",
        ),
        "one buffer for all": (
            run_with_mistake(reuse=True),
            "x is no longer what its F was given",
        ),
        "the last rank is 3": (
            run_with_mistake(fixed_last=True),
            "is every rank counted within",
        ),
        "send that waits": (run_with_mistake(wait=True), "with GPipe it worked"),
        "the world's rank": (run_with_mistake(in_world=True), "is every rank counted within"),
        "sends x back": (run_with_mistake(send_back="value"), "the rank behind it has the right"),
        "sends zeros back": (
            run_with_mistake(send_back="zeros"),
            "the rank behind it has the right",
        ),
        "the oldest forward first": (run_with_mistake(take="first"), "backward went through"),
        "the newest forward first": (run_with_mistake(take="last"), "backward went through"),
        "receives into inputs": (run_with_mistake(into_inputs=True), "has changed inputs[0]"),
        "works on its own inputs": (
            run_with_mistake(reads_inputs=True),
            "works on the inputs of the batch",
        ),
        "starts backward with ones": (
            run_with_mistake(start_gradient=False),
            "which output is it the gradient of",
        ),
        "zeroes the gradients": (run_with_mistake(zeroes=True), "only the gradient of micro-batch"),
        "a broadcast at the end": (run_with_mistake(detour=True), "talks to all ranks"),
        "labcode's Pipeline": (run_with_the_library, "write the sends and receives yourself"),
        "no backward": (run_forwards_alone, "has no gradients"),
        "every rank alone": (run_without_neighbours, "works on the inputs of the batch"),
        "receives from the last": (run_from_the_last, "messages do not meet"),
        "wipes what stood in .grad": (
            run_with_mistake(wipes=True),
            "what stood in .grad is gone",
        ),
        "divides .grad at the end": (
            run_with_mistake(divides_grads=True),
            "what stood in .grad is 0.3333 times as large",
        ),
        "asks for a gradient of the data": (
            run_with_mistake(asks_inputs=True),
            "inputs[0] requires a gradient on rank 0",
        ),
        "waits at once and again at the end": (
            run_with_mistake(waits_twice=True),
            "the handle of a send was waited for twice",
        ),
        "receives in the world": (
            run_with_mistake(without_group=("recv",)),
            "a message does not go through `group`",
        ),
        "sends in the world": (
            run_with_mistake(without_group=("send",)),
            "a message does not go through `group`",
        ),
        "no message in the group": (
            run_with_mistake(without_group=("send", "recv")),
            "a message does not go through `group`",
        ),
        "F without autograd": (
            run_with_mistake(without_autograd=True),
            "the stage ran without autograd",
        ),
        "y detached before B": (
            run_with_mistake(detaches=True),
            "backward was started from a tensor that has no graph",
        ),
        "the first rank sends None": (
            run_with_mistake(first_sends=True),
            "does another rank wait for it",
        ),
        "x is no leaf": (
            run_with_mistake(no_leaf=True),
            "was requires_grad_ called on this very x",
        ),
        "runs the stage in B too": (run_stage_again, "was called more than"),
        "does nothing": (lambda *_: 0, "ran its stage 0 times"),
    },
)


# ---- 12.3 1F1B as data


def order_of(rank, p, m, warmup=lambda rank, p: p - 1 - rank, numbers=range, swapped=False):
    """1F1B, or what is left of it with another warm-up, other backwards, or backward first."""
    first = min(warmup(rank, p), m)
    forward = [Action("F", rank, i) for i in range(m)]
    backward = [Action("B", rank, i) for i in numbers(m)]
    found = forward[:first]
    for pair in zip(forward[first:], backward):
        found += reversed(pair) if swapped else pair
    return found + backward[m - first :]


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


def order_with_a_late_forward(rank, p, m):
    """Right at the start; then one forward too many comes before a backward."""
    order = order_of(rank, p, m)
    if rank == p - 1 and m > 2:
        order[2:6] = [order[2], order[4], order[3], order[5]]
    return order


def order_without_end(rank, p, m):
    """The counter of the backwards is forgotten."""
    order = []
    done = 0
    while done < m:
        order.append(Action("F", rank, 0))
    return order


def last_two_reversed(m):
    numbers = list(range(m))
    numbers[-2:] = reversed(numbers[-2:])
    return numbers


ONE_F_ONE_B = Answers(
    check=l12.one_f_one_b,
    right={
        "two lists": order_of,
        "counters": order_with_counters,
        "B before F": order_backward_first,
    },
    wrong={
        "labcode's own": (lambda rank, p, m: schedule("1f1b", p, m)[rank], "write yours"),
        "GPipe": (
            lambda rank, p, m: gpipe_in_two_loops(rank, m),
            "2 are enough: its warm-up is too long",
        ),
        "warm-up of all but one": (
            lambda *args: order_of(*args, warmup=lambda rank, p: p - 1),
            "its warm-up is too long",
        ),
        "the last rank has a warm-up of one more pair": (
            order_with_a_late_forward,
            "1 is enough: after the warm-up each forward is followed by a backward",
        ),
        "a loop without end": (order_without_end, "loop"),
        "one warm-up too many": (
            lambda *args: order_of(*args, warmup=lambda rank, p: p - rank),
            "its warm-up is too long",
        ),
        "no warm-up": (
            lambda *args: order_of(*args, warmup=lambda rank, p: 0),
            "how many ranks are behind it",
        ),
        "warm-up of the other end": (
            lambda *args: order_of(*args, warmup=lambda rank, p: rank),
            "cannot start",
        ),
        "backward first": (lambda *args: order_of(*args, swapped=True), "cannot start"),
        "last backward forgotten": (
            lambda *args: order_of(*args)[:-1],
            "no backward of micro-batch",
        ),
        "cool-down forgotten": (
            lambda rank, p, m: order_of(rank, p, m)[: 2 * m - (p - 1 - rank)],
            "no backward of micro-batch",
        ),
        "backwards reversed": (
            lambda *args: order_of(*args, numbers=lambda m: list(reversed(range(m)))),
            "the first that goes back",
        ),
        "cool-down reversed": (
            lambda *args: order_of(*args, numbers=last_two_reversed),
            "the first that goes back",
        ),
        "text": (lambda *args: [str(one) for one in order_of(*args)], "give a list of Action"),
        "all ranks at once": (
            lambda rank, p, m: {number: order_of(number, p, m) for number in range(p)},
            "give a list of Action",
        ),
        "always stage 0": (
            lambda rank, p, m: [one._replace(stage=0) for one in order_of(rank, p, m)],
            "the stage with its own number",
        ),
        "backwards in front of the last forwards": (
            lambda rank, p, m: sorted(
                order_of(rank, p, m), key=lambda one: (one.microbatch, one.kind == "B")
            ),
            "how many ranks are behind it",
        ),
    },
)


# ---- 12.4 the weight's half put off


LATEST = []


def split_layer(
    *,
    when="later",
    product="sum",
    add="both",
    gives="dx",
    keeps="function",
    forward="right",
    put="backward",
    takes="in backward",
    spoils=False,
):
    """The layer of the lesson, or one with a mistake."""

    class Layer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, later):
            ctx.save_for_backward(x, weight)
            ctx.weight = weight
            ctx.later = later
            if put == "in forward":
                later.append(lambda: ctx.work())
            elif put == "in the last list":
                LATEST[:] = [later]
            if forward == "no transpose":
                return x @ weight
            return x @ weight.T

        @staticmethod
        def backward(ctx, grad):
            weight = param = ctx.weight
            if takes == "in backward":
                x_taken, weight = ctx.saved_tensors

            def compute():
                x, _ = ctx.saved_tensors if takes == "when called" else (x_taken, None)
                if product == "of each sample":
                    return grad.mT @ x
                if product == "over the first dim":
                    return (grad.mT @ x).sum(0)
                if product == "mean":
                    return (grad.flatten(0, -2).T @ x.flatten(0, -2)) / x.flatten(0, -2).shape[0]
                if product == "transposed":
                    return x.flatten(0, -2).T @ grad.flatten(0, -2)
                return grad.flatten(0, -2).T @ x.flatten(0, -2)

            early = compute() if when == "early" else None

            def weight_half():
                grad_weight = compute() if early is None else early
                if add == "to None":
                    param.grad += grad_weight
                elif add == "overwrite" or param.grad is None:
                    param.grad = grad_weight
                elif add == "both":
                    param.grad = param.grad + grad_weight

            if when == "at once":
                weight_half()
            elif when == "returned":
                return grad @ weight, compute(), None
            if put == "in forward":
                ctx.work = weight_half
            elif put == "in the last list":
                LATEST[0].append(weight_half)
            elif keeps == "function":
                ctx.later.append(weight_half)
            elif keeps == "tensor":
                ctx.later.append(grad)
            elif keeps == "twice":
                ctx.later.extend([weight_half, weight_half])
            if gives == "nothing":
                return None, None, None
            if spoils:
                grad_x = grad @ weight
                grad.zero_()
                return grad_x, None, None
            if gives == "doubled":
                return 2 * (grad @ weight), None, None
            return grad @ weight, None, None

    return Layer


class WithEinsum(torch.autograd.Function):
    """The same with einsum and F.linear, and the tensors as attributes."""

    @staticmethod
    def forward(ctx, x, weight, later):
        ctx.x, ctx.weight, ctx.later = x.detach(), weight, later
        return torch.nn.functional.linear(x, weight)

    @staticmethod
    def backward(ctx, grad):
        def work(x=ctx.x, weight=ctx.weight):
            found = torch.einsum("bo,bi->oi", grad.reshape(-1, grad.shape[-1]), x.flatten(0, -2))
            weight.grad = found + (0 if weight.grad is None else weight.grad)

        ctx.later.append(work)
        return torch.einsum("...o,oi->...i", grad, ctx.weight.detach()), None, None


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


SPLIT = Answers(
    check=lambda answer, ranks: l12.split(answer),
    right={
        "a closure": split_layer(),
        "einsum": WithEinsum,
        "partial": WithPartial,
    },
    wrong={
        "put there by forward": (
            split_layer(put="in forward"),
            "it is backward that appends",
        ),
        "put into the last list": (
            split_layer(put="in the last list"),
            "the list that this forward was given",
        ),
        "dA summed over the first dim": (
            split_layer(product="over the first dim"),
            "any number of leading dims",
        ),
        "added to None": (split_layer(add="to None"), "finds None in weight.grad"),
        "dA at once": (split_layer(when="at once"), "has to wait in `later`"),
        "dA returned": (split_layer(when="returned", keeps="none"), "has to wait in `later`"),
        "computed early": (split_layer(when="early"), "multiplies twice"),
        "nothing in later": (split_layer(keeps="none"), "`later` is empty"),
        "a tensor in later": (split_layer(keeps="tensor"), "put a function there"),
        "ctx asked when it is called": (
            split_layer(takes="when called"),
            "ctx gives them only while backward runs",
        ),
        "the gradient zeroed": (
            split_layer(spoils=True),
            "has changed the gradient that it was given",
        ),
        "twice in later": (split_layer(keeps="twice"), "2 entries"),
        "overwritten": (split_layer(add="overwrite"), "has replaced the gradient"),
        "the second one lost": (split_layer(add="first"), "left weight.grad as it was"),
        "a matrix for each sample": (split_layer(product="of each sample"), "size"),
        "transposed": (split_layer(product="transposed"), "size"),
        "a mean": (split_layer(product="mean"), "wrong values, for x [2, 5, 7]"),
        "no dx": (split_layer(gives="nothing"), "x has no gradient"),
        "dx doubled": (split_layer(gives="doubled"), "dx has the right shape"),
        "forward without transpose": (split_layer(forward="no transpose"), "shapes"),
    },
)


# ---- 12.5 choose


def best_of(
    p,
    m,
    stage_s,
    message_s,
    most,
    *,
    divide=True,
    whole=True,
    limit=True,
    skip=True,
    hop=True,
    times=None,
    ranks=None,
    strict=False,
):
    """The choice of the lesson, or one with a mistake."""
    found = []
    p = ranks or p
    if times is not None:
        stage_s = times(stage_s)
    for name, v in l12.CANDIDATES:
        if skip and name == "interleaved" and m % p:
            continue
        parts = v if divide else 1
        one_s = StageTimes(
            stage_s.forward_s / parts, stage_s.input_s / parts, stage_s.weight_s / parts
        )
        actions = schedule(name, p * v, m, p)
        line = simulate(actions, one_s, message_s=message_s if hop else 0)
        kept = line.peak_microbatches() / (v if whole else 1)
        if strict and kept >= most:
            continue
        if kept <= most or not limit:
            found.append((line.total_s, name, v))
    _, name, v = min(found)
    return name, v


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


def best_with_none(p, m, stage_s, message_s, most):
    """Starts with nothing, keeps what is strictly below the limit, and takes its name."""
    best = None
    for name, v in l12.CANDIDATES:
        if name == "interleaved" and m % p:
            continue
        one_s = StageTimes(stage_s.forward_s / v, stage_s.input_s / v, stage_s.weight_s / v)
        line = simulate(schedule(name, p * v, m, p), one_s, message_s=message_s)
        is_small = line.peak_microbatches() / v < most
        if is_small and (best is None or line.total_s < best[0]):
            best = (line.total_s, name, v)
    return best[1], best[2]


def best_as_a_list(p, m, stage_s, message_s, most):
    return list(best_of(p, m, stage_s, message_s, most))


CHOOSE = Answers(
    check=lambda answer, ranks: l12.choose(answer),
    right={
        "a list and min": best_of,
        "refusals caught": best_with_refusals,
        "as a list": best_as_a_list,
    },
    wrong={
        "times not divided by v": (
            functools.partial(best_of, divide=False),
            "another candidate that fits takes",
        ),
        "stages counted as ranks": (
            functools.partial(best_of, whole=False),
            "another candidate that fits takes",
        ),
        "memory ignored": (functools.partial(best_of, limit=False), "there is room for 4"),
        "messages ignored": (
            functools.partial(best_of, hop=False),
            "another candidate that fits takes",
        ),
        "m not looked at": (functools.partial(best_of, skip=False), "to be a multiple of"),
        "times not looked at": (
            functools.partial(best_of, times=lambda _: StageTimes(0.03, 0.03, 0.03)),
            "another candidate that fits takes",
        ),
        "I in place of W": (
            functools.partial(
                best_of, times=lambda one: StageTimes(one.forward_s, one.input_s, one.input_s)
            ),
            "another candidate that fits takes",
        ),
        "W in place of I": (
            functools.partial(
                best_of, times=lambda one: StageTimes(one.forward_s, one.weight_s, one.weight_s)
            ),
            "another candidate that fits takes",
        ),
        "F in place of I": (
            functools.partial(
                best_of, times=lambda one: StageTimes(one.forward_s, one.forward_s, one.weight_s)
            ),
            "another candidate that fits takes",
        ),
        "F in place of W": (
            functools.partial(
                best_of, times=lambda one: StageTimes(one.forward_s, one.input_s, one.forward_s)
            ),
            "another candidate that fits takes",
        ),
        "always four ranks": (
            functools.partial(best_of, ranks=4),
            "there is room for 9.6",
        ),
        "strictly below most": (best_with_none, "`at most` includes the limit itself"),
        "strictly below most, in a list": (
            functools.partial(best_of, strict=True),
            "`at most` includes the limit itself",
        ),
        "nothing returned": (lambda *_: None, "is there a `return`"),
        "always 1F1B": (lambda *_: ("1f1b", 1), "another candidate that fits takes"),
        "always interleaved": (lambda *_: ("interleaved", 2), "there is room for 4"),
        "only the name": (lambda *_: "zero_bubble", "return (name, v)"),
        "a candidate that is none": (lambda *_: ("interleaved", 8), "none of the candidates"),
    },
)

ANSWERS = {"12.1": GPIPE, "12.2": RUNNER, "12.3": ONE_F_ONE_B, "12.4": SPLIT, "12.5": CHOOSE}
