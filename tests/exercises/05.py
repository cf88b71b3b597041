"""Answers to the exercises of lesson 05, buckets, overlap and hooks."""

import contextlib
import functools
import math

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from answers import Answers, changed

from course.labs import l05_by_hand
from labcode.models import gpt
from labcode.parallel.data import Bucket

# ---- 5.1 one all-reduce for each bucket


def with_an_offset(buckets, group):
    p = group.size()
    for bucket in buckets:
        pieces = []
        for param in bucket:
            pieces.append(param.grad.reshape(-1) / p)
        row = torch.cat(pieces)
        dist.all_reduce(row, group=group)
        start = 0
        for param in bucket:
            stop = start + param.numel()
            param.grad = row[start:stop].reshape(param.shape)
            start = stop


def with_torchs_own_rows(buckets, group):
    from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

    for bucket in buckets:
        grads = [param.grad for param in bucket]
        row = _flatten_dense_tensors(grads)
        work = dist.all_reduce(row, group=group, async_op=True)
        work.wait()
        for grad, part in zip(grads, _unflatten_dense_tensors(row, grads)):
            grad[...] = part / group.size()


def preallocated(buckets, group):
    for bucket in buckets:
        row = bucket[0].grad.new_empty(sum(param.numel() for param in bucket))
        parts = row.split([param.numel() for param in bucket])
        for param, part in zip(bucket, parts):
            part.copy_(param.grad.view(-1))
        dist.all_reduce(row, group=group)
        row.div_(dist.get_world_size(group))
        for param, part in zip(bucket, parts):
            param.grad.view(-1).copy_(part)


def starts_all_then_waits(buckets, group):
    under_way = []
    for bucket in buckets:
        row = torch.cat([param.grad.flatten() for param in bucket])
        under_way.append((dist.all_reduce(row, group=group, async_op=True), row, bucket))
    for work, row, bucket in under_way:
        work.wait()
        for param, mean in zip(bucket, row.split([param.numel() for param in bucket])):
            param.grad.copy_(mean.view_as(param) / group.size())


def by_labcodes_buckets(buckets, group):
    for bucket in buckets:
        travelling = Bucket(bucket)
        travelling.send(group, group.size())
        travelling.receive()


ALL_REDUCE = "dist.all_reduce(row, group=group)"
ASYNC = "dist.all_reduce(row, group=group, async_op=True)"
COPY = "param.grad.copy_(mean.view_as(param))"

BUCKETS = Answers(
    solves="average_buckets",
    right={
        "an offset": with_an_offset,
        "torch's own rows": with_torchs_own_rows,
        "made in advance": preallocated,
        "with handles": starts_all_then_waits,
    },
    wrong={
        "parts of as many numbers as there are parameters": (
            changed("row.split(numbers) => row.split(len(bucket))"),
            "how many numbers belong to it?",
        ),
        "one for each parameter": (
            changed(f"{ALL_REDUCE} => for one in bucket: dist.all_reduce(one.grad, group=group)"),
            "for 1 bucket: one for each bucket",
        ),
        "all buckets in one": (
            changed("for bucket in buckets: => for bucket in [sum(buckets, [])]:"),
            "with a bucket for each parameter",
        ),
        "a sum": (changed("row /= p => pass"), "4 times as long as the mean over the group"),
        "divides by the world size": (
            changed("get_world_size(group) => get_world_size()"),
            "0.5 times as long as the mean",
        ),
        "forgets the group": (
            changed("row, group=group => row", "get_world_size(group) => get_world_size()"),
            "ranks outside of the group",
        ),
        "not copied back": (changed(f"{COPY} => grad = mean"), "is the mean copied into it?"),
        "split by bytes": (changed("param.numel() => param.nbytes"), "split_with_sizes"),
        "without view_as": (changed("mean.view_as(param) => mean"), "must match"),
        "in the wrong places": (
            changed("row /= p => row = row.flip(0) / p"),
            "right numbers in the wrong places",
        ),
        "only one rank sends": (
            changed(f"{ALL_REDUCE} => if dist.get_rank(group) == 0: {ALL_REDUCE}"),
            "rank 0 waits in all_reduce of float64",
        ),
        "waits too late": (
            changed(
                "p = dist => works = []\n    p = dist",
                f"{ALL_REDUCE} => works.append({ASYNC})",
                "row /= p => row = row / p",
                f"{COPY} => {COPY}\n    for work in works:\n        work.wait()",
            ),
            "was it there when you copied?",
        ),
        "divides before waiting": (
            changed(f"{ALL_REDUCE} => work = {ASYNC}", "row /= p => row /= p; work.wait()"),
            "what has to come after wait()?",
        ),
        "labcode's own": (l05_by_hand.average_buckets, "labcode's own answer"),
        "labcode's own, called": (
            changed("p = dist => return l05_by_hand.average_buckets(buckets, group)\n    p = dist"),
            "labcode's own answer",
        ),
        "labcode's buckets": (by_labcodes_buckets, "labcode's own answer"),
        "weights": (
            changed("param.grad.flatten() => param.detach().flatten()"),
            "weights or gradients?",
        ),
        "never waits": (
            changed(f"{ALL_REDUCE} => {ASYNC}", "row /= p => row = row / p"),
            "1 all-reduce started and 0 waited for",
        ),
        "sends for ever": (
            changed("for bucket in buckets: => while bucket := buckets[0]:"),
            "does your loop end?",
        ),
        "an error": (changed("param.grad.copy_ => param.gard.copy_"), "has no attribute 'gard'"),
        "no sum, a broadcast": (
            changed(f"{ALL_REDUCE} => dist.broadcast(row, group=group, group_src=0)"),
            "it calls broadcast: all-reduces are enough",
        ),
    },
)

# ---- 5.2 overlapped


class Base:
    """The skeleton of the exercise."""

    def __init__(self, module, group, buckets):
        self.module = module
        self.group = group
        self.buckets = buckets
        self.missing = [len(bucket) for bucket in buckets]
        self.under_way = []
        for number, bucket in enumerate(buckets):
            hook = functools.partial(self.gradient_ready, number)
            for param in bucket:
                param.register_post_accumulate_grad_hook(hook)


class OfTheLesson(Base):
    """Ends a step as the lesson does."""

    def finish_gradient_sync(self):
        for work, row, bucket in self.under_way:
            work.wait()
            row /= self.group.size()
            for param, mean in zip(bucket, row.split([param.numel() for param in bucket])):
                param.grad.copy_(mean.view_as(param))
        self.under_way.clear()
        self.missing = [len(bucket) for bucket in self.buckets]


class ByDictionary(Base):
    """Counts up, divides before, keeps the handles in a dictionary."""

    def gradient_ready(self, number, param):
        self.missing[number] = self.missing[number] - 1
        if self.missing[number] > 0:
            return
        self.missing[number] = len(self.buckets[number])
        pieces = []
        for member in self.buckets[number]:
            pieces.append(member.grad.view(-1))
        row = torch.cat(pieces) / self.group.size()
        self.handles = getattr(self, "handles", {})
        self.handles[number] = (dist.all_reduce(row, group=self.group, async_op=True), row)

    def finish_gradient_sync(self):
        for number, (handle, row) in self.handles.items():
            handle.wait()
            start = 0
            for member in self.buckets[number]:
                stop = start + member.numel()
                member.grad = row[start:stop].reshape(member.shape)
                start = stop
        self.handles = {}


class WithFutures(Base):
    """Lets the Futures of the handles put the means into place."""

    def gradient_ready(self, number, param):
        self.missing[number] -= 1
        if self.missing[number] == 0:
            bucket = self.buckets[number]
            row = torch.cat([other.grad.flatten() for other in bucket])
            work = dist.all_reduce(row, group=self.group, async_op=True)

            def hand_out(_):
                sizes = [other.numel() for other in bucket]
                for other, part in zip(bucket, row.split(sizes)):
                    other.grad.copy_(part.view_as(other) / self.group.size())

            self.under_way.append(work.get_future().then(hand_out))

    def finish_gradient_sync(self):
        torch.futures.wait_all(self.under_way)
        self.under_way = []
        self.missing = [len(bucket) for bucket in self.buckets]


class InOrder(OfTheLesson):
    """As labcode: a bucket waits for those before it."""

    def gradient_ready(self, number, param):
        self.missing[number] -= 1
        while len(self.under_way) < len(self.buckets) and not self.missing[len(self.under_way)]:
            bucket = self.buckets[len(self.under_way)]
            row = torch.cat([other.grad.flatten() for other in bucket])
            work = dist.all_reduce(row, group=self.group, async_op=True)
            self.under_way.append((work, row, bucket))


class ByPosition(OfTheLesson):
    """Gives its arguments by position."""

    def gradient_ready(self, number, param):
        self.missing[number] -= 1
        if not self.missing[number]:
            bucket = self.buckets[number]
            row = torch.hstack([other.grad.ravel() for other in bucket])
            work = dist.all_reduce(row, dist.ReduceOp.SUM, self.group, True)
            self.under_way += [(work, row, bucket)]


class Functional(OfTheLesson):
    """With the functional collectives."""

    def gradient_ready(self, number, param):
        self.missing[number] -= 1
        if self.missing[number] == 0:
            bucket = self.buckets[number]
            row = torch.cat([other.grad.flatten() for other in bucket])
            total = funcol.all_reduce(row, "sum", self.group)
            self.under_way.append((None, total, bucket))

    def finish_gradient_sync(self):
        for _, row, bucket in self.under_way:
            mean = funcol.wait_tensor(row) / self.group.size()
            for param, part in zip(bucket, mean.split([param.numel() for param in bucket])):
                param.grad.copy_(part.view_as(param))
        self.under_way.clear()
        self.missing = [len(bucket) for bucket in self.buckets]


SEND = """\
            bucket = self.buckets[number]
            row = torch.cat([other.grad.flatten() for other in bucket])
            work = dist.all_reduce(row, group=self.group, async_op=True)
            self.under_way.append((work, row, bucket))
"""
SEND_ALL_IF = "self.missing[number] == 0: => {}:\n          for number in range(len(self.buckets)):"
STARTED = "dist.all_reduce(row, group=self.group, async_op=True)"

OVERLAPPED = Answers(
    solves="OverlappedDataParallel",
    right={
        "a dictionary": ByDictionary,
        "positional arguments": ByPosition,
        "Futures": WithFutures,
        "in a fixed order": InOrder,
        "functional collectives": Functional,
    },
    wrong={
        "without a request": (
            changed(", async_op=True => "),
            "returns its request only with async_op=True",
        ),
        "waits in the hook": (
            changed(f"{STARTED} => {STARTED}\n            work.wait()"),
            "gradient_ready calls wait()",
        ),
        "not asynchronous": (
            changed(", async_op=True => ", "            work.wait() =>             pass"),
            "start it with async_op=True",
        ),
        "sent too early": (changed("== 0: => == 1:"), "before the last of its gradients was ready"),
        "divides by the world size": (
            changed("get_world_size(self.group) => get_world_size()"),
            "0.5 times as long as the mean",
        ),
        "forgets the group": (
            changed("group=self.group, => ", "get_world_size(self.group) => get_world_size()"),
            "ranks outside of the group",
        ),
        "missing not set back": (
            changed("clear()\n        self.missing = => clear()\n        new_list ="),
            "step 2: nothing was sent",
        ),
        "under_way not cleared": (
            changed("self.under_way.clear() => pass"),
            "under_way still holds",
        ),
        "not copied back": (changed(f"{COPY} => pass"), "is the mean copied into it?"),
        "never waited for": (changed("work.wait() => pass"), "and 0 waited for"),
        "a sum": (changed("row /= p => pass"), "4 times as long as the mean over the group"),
        "all after backward": (
            changed(
                "== 0: => == -1:",
                f"p = dist => for number in range(len(self.buckets)):\n{SEND}        p = dist",
            ),
            "everything was sent after backward",
        ),
        "one for each parameter": (
            changed(
                "self.missing[number] == 0: => True:",
                "bucket = self.buckets[number] => bucket = [param]",
            ),
            "an all-reduce of",
        ),
        "nothing sent": (changed("== 0: => == -1:"), "no all-reduce was started"),
        "all with the last gradient": (
            changed(SEND_ALL_IF.format("not any(self.missing)")),
            "backward went on to",
        ),
        "all with the last bucket": (
            changed(
                SEND_ALL_IF.format("number == len(self.buckets) - 1 and not self.missing[number]")
            ),
            "backward went on to 2",
        ),
        "one bucket late": (
            changed(
                "== 0: => == 0 and number == len(self.buckets) - 1:",
                "        if self.missing => "
                "        if number > 0 and self.missing[number] == len(self.buckets[number]) - 1:\n"
                + SEND.replace("[number]", "[number - 1]")
                + "        if self.missing",
            ),
            "backward went on to 1 more gradient before it left",
        ),
        "divided before wait()": (
            changed(
                f"{STARTED} => {STARTED}\n            row.div_(self.group.size())",
                "row /= p => pass",
            ),
            "what has to come after wait()?",
        ),
        "the row made anew": (
            changed("row /= p => row = torch.cat([one.grad.flatten() for one in bucket]) / p"),
            "0.25 times: where is the sum",
        ),
        "Futures not waited for": (
            changed(
                f"work = {STARTED} => work = {STARTED}.get_future()",
                "            work.wait() =>             pass",
            ),
            "waited for: without wait() nobody",
        ),
        "labcode's own": (l05_by_hand.OverlappedDataParallel, "labcode's own answer"),
        "labcode's own, called": (
            changed(
                "        p = dist => "
                "        return l05_by_hand.OverlappedDataParallel.finish_gradient_sync(self)\n"
                "        p = dist"
            ),
            "labcode's own answer",
        ),
        "threads": (
            changed(
                f"work = {STARTED} => import threading\n"
                "            call = functools.partial(dist.all_reduce, row, group=self.group)\n"
                "            work = threading.Thread(target=call)\n"
                "            work.start()\n"
                "            work.wait = work.join"
            ),
            "in a thread of its own",
        ),
        "weights": (
            changed("other.grad.flatten() => other.detach().flatten()"),
            "weights or gradients?",
        ),
        "a Future in the hook": (
            changed(f"{STARTED} => {STARTED}\n            work.get_future().wait()"),
            "wait in finish_gradient_sync",
        ),
    },
)

# ---- 5.3 no_sync


class Counted(l05_by_hand.OverlappedDataParallel):
    """Counts how deep it is in `no_sync`."""

    depth = 0

    def gradient_ready(self, number, param):
        if self.depth > 0:
            return
        super().gradient_ready(number, param)

    @contextlib.contextmanager
    def no_sync(self):
        self.depth += 1
        try:
            yield self
        finally:
            self.depth -= 1


class Remembers(l05_by_hand.OverlappedDataParallel):
    """Puts back what was there, with a context of its own."""

    def __init__(self, module, group, buckets):
        super().__init__(module, group, buckets)
        self.sends = True

    def gradient_ready(self, number, param):
        return super().gradient_ready(number, param) if self.sends else None

    def no_sync(self):
        stack = contextlib.ExitStack()
        stack.callback(setattr, self, "sends", True)
        self.sends = False
        return stack


class HandedOn(l05_by_hand.OverlappedDataParallel):
    """A context made of a function that hands on the generator of another one."""

    sends = True

    def gradient_ready(self, number, param):
        if self.sends:
            super().gradient_ready(number, param)

    def quietly(self):
        self.sends = False
        try:
            yield
        finally:
            self.sends = True

    @contextlib.contextmanager
    def no_sync(self):
        return self.quietly()


YIELD = "        try:\n            yield\n        finally:\n            self.sends = True"

QUIET = Answers(
    solves="QuietDataParallel",
    right={"a depth": Counted, "its own context": Remembers, "handed on": HandedOn},
    wrong={
        "no yield": (changed(f"{YIELD} => "), "no_sync has no `yield`"),
        "no decorator": (changed("@contextlib.contextmanager => "), "what stood above its `def`?"),
        "no finally": (
            changed(f"{YIELD} =>         yield\n        self.sends = True"),
            "after an error inside no_sync()",
        ),
        "not set back": (
            changed("            self.sends = True =>             pass"),
            "is the flag set back?",
        ),
        "the wrong way round": (changed("self.sends = False => pass"), "inside no_sync()"),
        "nobody asks": (changed("if self.sends: => if True:"), "who asks whether gradients are"),
        "no context": (
            changed("@contextlib.contextmanager => ", f"{YIELD} => "),
            "it returned None",
        ),
        "never sends": (
            changed("super().gradient_ready(number, param) => pass"),
            "sent nothing",
        ),
        "clears what was added": (
            changed("self.sends = False => self.sends = False; self.module.zero_grad()"),
            "away from the mean",
        ),
        "swallows the error": (
            changed(
                "        finally: =>         except Exception:\n            pass\n        finally:"
            ),
            "does not come out of the `with` block",
        ),
        "a flag of the class": (
            changed(
                "self.sends = False => type(self).sends = False",
                "            self.sends = True =>             type(self).sends = True",
            ),
            "another model sends nothing either",
        ),
        "counts inside": (
            changed(
                "        if self.sends: =>         self.missing[number] -= 1\n"
                "        if self.sends and self.missing[number] == 0:\n"
                "            self.missing[number] = 1"
            ),
            "who counts inside no_sync()?",
        ),
    },
)

# ---- 5.4 clipping


def with_floats(model, optimizer, inputs, targets, max_norm):
    model.module.zero_grad()
    loss = gpt.loss(model.module(inputs), targets)
    loss.backward()
    model.finish_gradient_sync()
    total = 0.0
    for param in model.module.parameters():
        total += param.grad.norm().item() ** 2
    norm = math.sqrt(total)
    factor = min(1.0, max_norm / norm)
    for param in model.module.parameters():
        param.grad.mul_(factor)
    optimizer.step()
    return norm


def with_one_row(model, optimizer, inputs, targets, max_norm):
    optimizer.zero_grad(set_to_none=False)
    gpt.loss(model.module(inputs), targets).backward()
    model.finish_gradient_sync()
    row = torch.cat([param.grad.flatten() for param in model.module.parameters()])
    norm = torch.linalg.vector_norm(row)
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for param in model.module.parameters():
        param.grad = param.grad * scale
    optimizer.step()
    return norm.item()


FINISH = "    model.finish_gradient_sync()\n"
NORM = """\
    squares = [param.grad.square().sum() for param in model.module.parameters()]
    norm = torch.stack(squares).sum().sqrt()
"""
SCALE = "            param.grad *= max_norm / norm\n"


def clips_first(model, optimizer, inputs, targets, max_norm):
    optimizer.zero_grad()
    gpt.loss(model.module(inputs), targets).backward()
    norm = torch.cat([param.grad.flatten() for param in model.module.parameters()]).norm()
    if norm > max_norm:
        for param in model.module.parameters():
            param.grad *= max_norm / norm
    l05_by_hand.average_buckets(model.buckets, model.group)
    model.under_way.clear()
    model.missing = [len(bucket) for bucket in model.buckets]
    optimizer.step()
    return norm


CLIPPED = Answers(
    solves="clipped_step",
    right={"floats": with_floats, "one row": with_one_row},
    wrong={
        "clips before the average": (clips_first, "take it after the average"),
        "each by its own norm": (
            changed("max_norm / norm => min(1.0, max_norm / param.grad.norm().item())"),
            "do all parameters have the same factor",
        ),
        "always scales": (
            changed("if norm > max_norm: => if True:"),
            "10 times as long as it should",
        ),
        "never scales": (changed("if norm > max_norm: => if False:"), "not clipped"),
        "the norm afterwards": (
            changed(f"    optimizer.step() => {NORM}    optimizer.step()"),
            "the norm after clipping",
        ),
        "a sum of norms": (
            changed("square().sum() for => norm() for", ".sum().sqrt() => .sum()"),
            "the sum of the norms of all parameters",
        ),
        "no root": (
            changed("return norm => return torch.stack(squares).sum()"),
            "the square of the norm",
        ),
        "not averaged": (
            changed(
                f"{FINISH} => ",
                "return norm => model.finish_gradient_sync()\n    return norm",
            ),
            "the gradient of this rank's own share",
        ),
        "squares over the ranks": (
            changed(
                "    norm = torch.stack(squares).sum().sqrt() => "
                "    square = torch.stack(squares).sum()\n"
                "    dist.all_reduce(square, group=model.group)\n"
                "    norm = square.sqrt()"
            ),
            "sqrt(4) times the norm",
        ),
        "zero_grad forgotten": (
            changed("optimizer.zero_grad() => pass"),
            "what is in `.grad` when it begins?",
        ),
        "no step": (changed("optimizer.step() => pass"), "who makes the step?"),
        "PyTorch's own": (
            changed("return norm => return torch.nn.utils.clip_grad_norm_([], 1.0)"),
            "take the norm yourself",
        ),
        "averages twice": (
            changed(
                f"{FINISH} => {FINISH}    for param in model.module.parameters():\n"
                "        dist.all_reduce(param.grad, group=model.group)\n"
                "        param.grad /= model.group.size()\n"
            ),
            "when finish_gradient_sync returns?",
        ),
        "clips by value": (
            changed(f"{SCALE} =>             param.grad.clamp_(-max_norm, max_norm)\n"),
            "it limits the norm of all of them together",
        ),
        "the loss": (
            changed("return norm => return gpt.loss(model.module(inputs), targets)"),
            "it returns the norm",
        ),
        "no return": (changed("return norm => pass"), "it returned None"),
    },
)

# ---- 5.5 a hook that compresses


def divides_afterwards(group, bucket):
    def to_mean(done):
        return done.value()[0].float() / dist.get_world_size(group)

    half = bucket.buffer().to(torch.bfloat16)
    return dist.all_reduce(half, group=group, async_op=True).get_future().then(to_mean)


def with_state(state, bucket):
    half = bucket.buffer().bfloat16().div_(state.size())
    future = dist.all_reduce(half, group=state, async_op=True).get_future()

    def decompress(finished):
        bucket.buffer().copy_(finished.value()[0])
        return bucket.buffer()

    return future.then(decompress)


def hook_by_gradients(group, bucket):
    """Fills the row gradient by gradient, and sends it whole."""
    row = torch.cat([gradient.flatten() for gradient in bucket.gradients()]).bfloat16()

    def hand_out(done):
        start = 0
        for gradient in bucket.gradients():
            part = done.value()[0][start : start + gradient.numel()]
            gradient.copy_(part.view_as(gradient) / group.size())
            start += gradient.numel()
        return bucket.buffer()

    work = dist.all_reduce(row, group=group, async_op=True)
    return work.get_future().then(hand_out)


def hook_one_for_each_gradient(group, bucket):
    rows = [gradient.to(torch.bfloat16) / group.size() for gradient in bucket.gradients()]
    futures = []
    for row in rows:
        futures.append(dist.all_reduce(row, group=group, async_op=True).get_future())

    def hand_out(_):
        for gradient, row in zip(bucket.gradients(), rows):
            gradient.copy_(row)
        return bucket.buffer()

    return torch.futures.collect_all(futures).then(hand_out)


def hook_functional(group, bucket):
    half = (bucket.buffer() / group.size()).bfloat16()
    future = torch.futures.Future()
    future.set_result(funcol.wait_tensor(funcol.all_reduce(half, "sum", group)).float())
    return future


def hook_tensor(group, bucket):
    half = (bucket.buffer() / group.size()).bfloat16()
    dist.all_reduce(half, group=group)
    return half.float()


COMPRESSED = Answers(
    solves="compress",
    right={
        "divides afterwards": divides_afterwards,
        "into the buffer": with_state,
        "gradient by gradient in one row": hook_by_gradients,
    },
    wrong={
        "a sum": (changed(" / group.size() => "), "4 times as long as the mean"),
        "full precision": (changed(".bfloat16() => "), "float32 travelled"),
        "half precision": (changed(".bfloat16() => .half()"), "float16 travelled"),
        "a list": (
            changed("full.copy_(done.value()[0]) => done.value()"),
            "the Future holds a list",
        ),
        "no then": (
            changed(".then(lambda done: full.copy_(done.value()[0])) => "),
            "the Future holds a list",
        ),
        "another name": (
            changed("bucket): => gradients):", "bucket.buffer() => gradients.buffer()"),
            "parameters (state, bucket)",
        ),
        "waits": (
            changed("    return => work.wait()\n    return".replace("work", "    work", 1)),
            "the hook waits for the all-reduce",
        ),
        "a tensor": (hook_tensor, "it returned a Tensor"),
        "forgets the group": (
            changed("group=group, => ", "group.size() => dist.get_world_size()"),
            "ranks outside of the group",
        ),
        "one for each gradient": (hook_one_for_each_gradient, "all-reduces for one bucket"),
        "functional collectives": (hook_functional, "the hook waits for the all-reduce"),
        "PyTorch's own": (
            changed(
                "full = => from torch.distributed.algorithms.ddp_comm_hooks.default_hooks "
                "import bf16_compress_hook\n    return bf16_compress_hook(group, bucket)\n"
                "    full ="
            ),
            "PyTorch's answer to this exercise",
        ),
        "labcode's own": (l05_by_hand.compress, "labcode's own answer"),
        "no return": (changed("    return work =>     work"), "it returned None"),
    },
)

ANSWERS = {
    "5.1": BUCKETS,
    "5.2": OVERLAPPED,
    "5.3": QUIET,
    "5.4": CLIPPED,
    "5.5": COMPRESSED,
}
