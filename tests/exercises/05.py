"""Answers to the exercises of lesson 05, buckets, overlap and hooks."""

import contextlib
import functools
import math
import threading

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from answers import Answers
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

from labcode.models import gpt
from labcode.parallel.data import Bucket
from labcode.teach.exercises import l05
from labcode.teach.labs import l05_by_hand

# ---- 5.1 one all-reduce for each bucket


def row_and_split(buckets, group):
    for bucket in buckets:
        row = torch.cat([param.grad.flatten() for param in bucket])
        dist.all_reduce(row, group=group)
        row /= dist.get_world_size(group)
        for param, mean in zip(bucket, row.split([param.numel() for param in bucket])):
            param.grad.copy_(mean.view_as(param))


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


def waits_too_late(buckets, group):
    under_way = []
    for bucket in buckets:
        row = torch.cat([param.grad.flatten() for param in bucket])
        under_way.append(dist.all_reduce(row, group=group, async_op=True))
        for param, mean in zip(bucket, row.split([param.numel() for param in bucket])):
            param.grad.copy_(mean.view_as(param) / group.size())
    for work in under_way:
        work.wait()


def divides_before_waiting(buckets, group):
    for bucket in buckets:
        row = torch.cat([param.grad.flatten() for param in bucket])
        work = dist.all_reduce(row, group=group, async_op=True)
        row /= group.size()
        work.wait()
        for param, mean in zip(bucket, row.split([param.numel() for param in bucket])):
            param.grad.copy_(mean.view_as(param))


def never_waits(buckets, group):
    for bucket in buckets:
        row = torch.cat([param.grad.flatten() for param in bucket]) / group.size()
        dist.all_reduce(row, group=group, async_op=True)
        for param, mean in zip(bucket, row.split([param.numel() for param in bucket])):
            param.grad.copy_(mean.view_as(param))


def one_for_each_parameter(buckets, group):
    for bucket in buckets:
        for param in bucket:
            dist.all_reduce(param.grad, group=group)
            param.grad /= group.size()


def all_buckets_in_one(buckets, group):
    row_and_split([[param for bucket in buckets for param in bucket]], group)


def a_sum(buckets, group):
    for bucket in buckets:
        row = torch.cat([param.grad.flatten() for param in bucket])
        dist.all_reduce(row, group=group)
        for param, mean in zip(bucket, row.split([param.numel() for param in bucket])):
            param.grad.copy_(mean.view_as(param))


def divides_by_the_world(buckets, group):
    a_sum(buckets, group)
    for bucket in buckets:
        for param in bucket:
            param.grad /= dist.get_world_size()


def in_the_world(buckets, group):
    row_and_split(buckets, dist.group.WORLD)


def not_copied_back(buckets, group):
    for bucket in buckets:
        row = torch.cat([param.grad.flatten() for param in bucket])
        dist.all_reduce(row, group=group)
        row /= group.size()
        for param, mean in zip(bucket, row.split([param.numel() for param in bucket])):
            grad = param.grad
            grad = mean.view_as(param)  # noqa: F841


def split_by_bytes(buckets, group):
    for bucket in buckets:
        row = torch.cat([param.grad.flatten() for param in bucket])
        dist.all_reduce(row, group=group)
        row /= group.size()
        for param, mean in zip(bucket, row.split([param.nbytes for param in bucket])):
            param.grad.copy_(mean.view_as(param))


def without_view_as(buckets, group):
    for bucket in buckets:
        row = torch.cat([param.grad.flatten() for param in bucket])
        dist.all_reduce(row, group=group)
        row /= group.size()
        for param, mean in zip(bucket, row.split([param.numel() for param in bucket])):
            param.grad.copy_(mean)


def backwards(buckets, group):
    for bucket in buckets:
        row = torch.cat([param.grad.flatten() for param in bucket])
        dist.all_reduce(row, group=group)
        row = row.flip(0) / group.size()
        start = 0
        for param in reversed(bucket):
            stop = start + param.numel()
            param.grad.copy_(row[start:stop].view_as(param))
            start = stop


def only_the_first_sends(buckets, group):
    for bucket in buckets:
        row = torch.cat([param.grad.flatten() for param in bucket])
        if dist.get_rank(group) == 0:
            dist.all_reduce(row, group=group)
        row /= group.size()


def by_labcode(buckets, group):
    l05_by_hand.average_buckets(buckets, group)


def by_labcodes_buckets(buckets, group):
    for bucket in buckets:
        travelling = Bucket(bucket)
        travelling.send(group, group.size())
        travelling.receive()


def joins_weights(buckets, group):
    for bucket in buckets:
        row = torch.cat([param.detach().flatten() for param in bucket])
        dist.all_reduce(row, group=group)
        row /= group.size()
        for param, mean in zip(bucket, row.split([param.numel() for param in bucket])):
            param.grad.copy_(mean.view_as(param))


BUCKETS = Answers(
    check=l05.average_buckets,
    right={
        "cat and split": row_and_split,
        "an offset": with_an_offset,
        "torch's own rows": with_torchs_own_rows,
        "made in advance": preallocated,
        "with handles": starts_all_then_waits,
    },
    wrong={
        "one for each parameter": (one_for_each_parameter, "for 1 bucket: one for each bucket"),
        "all buckets in one": (all_buckets_in_one, "with a bucket for each parameter"),
        "a sum": (a_sum, "4 times as long as the mean over the group"),
        "divides by the world size": (divides_by_the_world, "0.5 times as long as the mean"),
        "forgets the group": (in_the_world, "ranks outside of the group"),
        "not copied back": (not_copied_back, "is the mean copied into it?"),
        "split by bytes": (split_by_bytes, "split_with_sizes"),
        "without view_as": (without_view_as, "must match"),
        "in the wrong places": (backwards, "right numbers in the wrong places"),
        "only one rank sends": (only_the_first_sends, "every rank that a call needs"),
        "waits too late": (waits_too_late, "was it there when you copied?"),
        "divides before waiting": (divides_before_waiting, "what has to come after wait()?"),
        "labcode's own": (l05_by_hand.average_buckets, "labcode's own answer"),
        "labcode's own, called": (by_labcode, "labcode's own answer"),
        "labcode's buckets": (by_labcodes_buckets, "labcode's own answer"),
        "weights": (joins_weights, "weights or gradients?"),
        "never waits": (never_waits, "1 all-reduce started and 0 waited for"),
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


class AsInTheLesson(Base):
    waits_in_hook = False
    is_async = True
    early = 0
    by_world = False
    own_group = True
    resets = True
    clears = True
    copies = True
    waits = True
    divides = True

    def gradient_ready(self, number, param):
        self.missing[number] -= 1
        if self.missing[number] == self.early:
            bucket = self.buckets[number]
            row = torch.cat([other.grad.flatten() for other in bucket])
            group = self.group if self.own_group else None
            work = dist.all_reduce(row, group=group, async_op=self.is_async)
            if self.waits_in_hook:
                work.wait()
            self.under_way.append((work, row, bucket))

    def finish_gradient_sync(self):
        group = self.group if self.own_group else None
        p = dist.get_world_size(None if self.by_world else group)
        for work, row, bucket in self.under_way:
            if self.waits and work is not None:
                work.wait()
            if self.divides:
                row /= p
            sizes = [param.numel() for param in bucket]
            for param, mean in zip(bucket, row.split(sizes)):
                if self.copies:
                    param.grad.copy_(mean.view_as(param))
        if self.clears:
            self.under_way.clear()
        if self.resets:
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


class WithFutures(AsInTheLesson):
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


class FuturesNotWaitedFor(WithFutures):
    def finish_gradient_sync(self):
        self.under_way = []
        self.missing = [len(bucket) for bucket in self.buckets]


class FutureInTheHook(AsInTheLesson):
    def gradient_ready(self, number, param):
        super().gradient_ready(number, param)
        if self.missing[number] == 0:
            self.under_way[-1][0].get_future().wait()


class InOrder(AsInTheLesson):
    """As labcode: a bucket waits for those before it."""

    def gradient_ready(self, number, param):
        self.missing[number] -= 1
        while len(self.under_way) < len(self.buckets) and not self.missing[len(self.under_way)]:
            bucket = self.buckets[len(self.under_way)]
            row = torch.cat([other.grad.flatten() for other in bucket])
            work = dist.all_reduce(row, group=self.group, async_op=True)
            self.under_way.append((work, row, bucket))


class Late(AsInTheLesson):
    """Buckets leave during backward, but later than they could."""

    def send(self, number):
        bucket = self.buckets[number]
        row = torch.cat([other.grad.flatten() for other in bucket])
        work = dist.all_reduce(row, group=self.group, async_op=True)
        self.under_way.append((work, row, bucket))


class WithTheLastGradient(Late):
    def gradient_ready(self, number, param):
        self.missing[number] -= 1
        if not any(self.missing):
            for other in range(len(self.buckets)):
                self.send(other)


class WithTheLastBucket(Late):
    def gradient_ready(self, number, param):
        self.missing[number] -= 1
        if self.missing[number] == 0 and number == len(self.buckets) - 1:
            for other in range(len(self.buckets)):
                self.send(other)


class InPairs(Late):
    def gradient_ready(self, number, param):
        self.missing[number] -= 1
        if self.missing[number] == 0:
            if number % 2 == 1:
                self.send(number - 1)
                self.send(number)
            elif number == len(self.buckets) - 1:
                self.send(number)


class OneBucketLate(Late):
    def gradient_ready(self, number, param):
        self.missing[number] -= 1
        if number > 0 and self.missing[number] == len(self.buckets[number]) - 1:
            self.send(number - 1)
        if self.missing[number] == 0 and number == len(self.buckets) - 1:
            self.send(number)


class DividedBeforeWaiting(AsInTheLesson):
    divides = False

    def gradient_ready(self, number, param):
        super().gradient_ready(number, param)
        if self.missing[number] == 0:
            self.under_way[-1][1].div_(self.group.size())


class RowMadeAnew(AsInTheLesson):
    def finish_gradient_sync(self):
        for work, _, bucket in self.under_way:
            work.wait()
            row = torch.cat([other.grad.flatten() for other in bucket]) / self.group.size()
            for param, mean in zip(bucket, row.split([param.numel() for param in bucket])):
                param.grad.copy_(mean.view_as(param))
        self.under_way.clear()
        self.missing = [len(bucket) for bucket in self.buckets]


class ByPosition(AsInTheLesson):
    """Gives its arguments by position."""

    def gradient_ready(self, number, param):
        self.missing[number] -= 1
        if not self.missing[number]:
            bucket = self.buckets[number]
            row = torch.hstack([other.grad.ravel() for other in bucket])
            work = dist.all_reduce(row, dist.ReduceOp.SUM, self.group, True)
            self.under_way += [(work, row, bucket)]


class AfterBackward(AsInTheLesson):
    def gradient_ready(self, number, param):
        self.missing[number] -= 1

    def finish_gradient_sync(self):
        row_and_split(self.buckets, self.group)
        self.missing = [len(bucket) for bucket in self.buckets]


class OneForEachParameter(AsInTheLesson):
    def gradient_ready(self, number, param):
        work = dist.all_reduce(param.grad, group=self.group, async_op=True)
        self.under_way.append((work, param.grad, [param]))

    def finish_gradient_sync(self):
        for work, grad, _ in self.under_way:
            work.wait()
            grad /= self.group.size()
        self.under_way.clear()


class NothingSent(AsInTheLesson):
    def gradient_ready(self, number, param):
        self.missing[number] -= 1


class ByLabcode(l05_by_hand.Overlapped):
    pass


class Functional(AsInTheLesson):
    """With the functional collectives, which the check cannot follow."""

    def gradient_ready(self, number, param):
        self.missing[number] -= 1
        if self.missing[number] == 0:
            bucket = self.buckets[number]
            row = torch.cat([other.grad.flatten() for other in bucket])
            total = funcol.all_reduce(row, "sum", self.group)
            self.under_way.append((None, total, bucket))

    def finish_gradient_sync(self):
        self.under_way = [
            (None, funcol.wait_tensor(row), bucket) for _, row, bucket in self.under_way
        ]
        super().finish_gradient_sync()


class InThreads(AsInTheLesson):
    def gradient_ready(self, number, param):
        self.missing[number] -= 1
        if self.missing[number] == 0:
            bucket = self.buckets[number]
            row = torch.cat([other.grad.flatten() for other in bucket])
            thread = threading.Thread(
                target=dist.all_reduce, args=(row,), kwargs={"group": self.group}
            )
            thread.start()
            thread.wait = thread.join
            self.under_way.append((thread, row, bucket))


class JoinsWeights(AsInTheLesson):
    def gradient_ready(self, number, param):
        self.missing[number] -= 1
        if self.missing[number] == 0:
            bucket = self.buckets[number]
            row = torch.cat([other.detach().flatten() for other in bucket])
            work = dist.all_reduce(row, group=self.group, async_op=True)
            self.under_way.append((work, row, bucket))


def variant(**changes):
    """The lesson's answer with some things done otherwise."""
    return type("Variant", (AsInTheLesson,), changes)


OVERLAPPED = Answers(
    check=l05.overlapped,
    right={
        "as in the lesson": AsInTheLesson,
        "a dictionary": ByDictionary,
        "positional arguments": ByPosition,
        "Futures": WithFutures,
        "in a fixed order": InOrder,
    },
    wrong={
        "waits in the hook": (variant(waits_in_hook=True), "gradient_ready calls wait()"),
        "not asynchronous": (variant(is_async=False), "start it with async_op=True"),
        "sent too early": (variant(early=1), "before the last of its gradients was ready"),
        "divides by the world size": (variant(by_world=True), "0.5 times as long as the mean"),
        "forgets the group": (variant(own_group=False), "ranks outside of the group"),
        "missing not set back": (variant(resets=False), "step 2: nothing was sent"),
        "under_way not cleared": (variant(clears=False), "under_way still holds"),
        "not copied back": (variant(copies=False), "is the mean copied into it?"),
        "never waited for": (variant(waits=False), "and 0 waited for"),
        "a sum": (variant(divides=False), "4 times as long as the mean over the group"),
        "all after backward": (AfterBackward, "everything was sent after backward"),
        "one for each parameter": (OneForEachParameter, "an all-reduce of"),
        "nothing sent": (NothingSent, "no all-reduce was started"),
        "all with the last gradient": (WithTheLastGradient, "backward went on to"),
        "all with the last bucket": (WithTheLastBucket, "backward went on to"),
        "in pairs": (InPairs, "backward went on to"),
        "one bucket late": (OneBucketLate, "backward went on to 1 more gradient before it left"),
        "divided before wait()": (DividedBeforeWaiting, "what has to come after wait()?"),
        "the row made anew": (RowMadeAnew, "0.25 times: where is the sum"),
        "Futures not waited for": (FuturesNotWaitedFor, "waited for: without wait() nobody"),
        "labcode's own": (l05_by_hand.Overlapped, "labcode's own answer"),
        "labcode's own, inherited": (ByLabcode, "labcode's own answer"),
        "functional collectives": (Functional, "not by `dist.all_reduce`"),
        "threads": (InThreads, "in a thread of its own"),
        "weights": (JoinsWeights, "weights or gradients?"),
        "a Future in the hook": (FutureInTheHook, "gradient_ready calls wait()"),
    },
)

# ---- 5.3 no_sync


class Quiet(l05_by_hand.Overlapped):
    sends = True
    during = False
    after = True

    def gradient_ready(self, number, param):
        if self.sends:
            super().gradient_ready(number, param)

    @contextlib.contextmanager
    def no_sync(self):
        self.sends = self.during
        try:
            yield
        finally:
            self.sends = self.after


class Counted(l05_by_hand.Overlapped):
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


class Remembers(l05_by_hand.Overlapped):
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


class WithoutFinally(Quiet):
    @contextlib.contextmanager
    def no_sync(self):
        self.sends = False
        yield
        self.sends = True


class NoFlagAsked(Quiet):
    def gradient_ready(self, number, param):
        l05_by_hand.Overlapped.gradient_ready(self, number, param)


class WithoutReturn(Quiet):
    def no_sync(self):
        self.sends = False


class ForgetsTheRest(Quiet):
    def gradient_ready(self, number, param):
        if not self.sends:
            return


class ClearsGradients(Quiet):
    @contextlib.contextmanager
    def no_sync(self):
        self.module.zero_grad()
        with super().no_sync():
            yield


class Swallows(Quiet):
    @contextlib.contextmanager
    def no_sync(self):
        self.sends = False
        try:
            yield
        except Exception:
            pass
        finally:
            self.sends = True


class FlagOfTheClass(Quiet):
    @contextlib.contextmanager
    def no_sync(self):
        type(self).sends = False
        try:
            yield
        finally:
            type(self).sends = True


class CountsInside(Quiet):
    def gradient_ready(self, number, param):
        self.missing[number] -= 1
        if self.sends and self.missing[number] == 0:
            self.missing[number] = 1
            super().gradient_ready(number, param)


class WithoutYield(Quiet):
    @contextlib.contextmanager
    def no_sync(self):
        self.sends = False


class WithoutDecorator(Quiet):
    def no_sync(self):
        self.sends = False
        try:
            yield
        finally:
            self.sends = True


class HandedOn(Quiet):
    """A context made of a function that hands on the generator of another one."""

    def quietly(self):
        self.sends = False
        try:
            yield
        finally:
            self.sends = True

    @contextlib.contextmanager
    def no_sync(self):
        return self.quietly()


QUIET = Answers(
    check=l05.quiet,
    right={
        "a flag": Quiet,
        "a depth": Counted,
        "its own context": Remembers,
        "handed on": HandedOn,
    },
    wrong={
        "no yield": (WithoutYield, "no_sync has no `yield`"),
        "no decorator": (WithoutDecorator, "what stood above its `def`?"),
        "no finally": (WithoutFinally, "after an error inside no_sync()"),
        "not set back": (type("Stuck", (Quiet,), {"after": False}), "is the flag set back?"),
        "the wrong way round": (type("Turned", (Quiet,), {"during": True}), "inside no_sync()"),
        "nobody asks": (NoFlagAsked, "who asks whether gradients are to be sent?"),
        "no context": (WithoutReturn, "it returned None"),
        "never sends": (ForgetsTheRest, "sent nothing"),
        "clears what was added": (ClearsGradients, "away from the mean"),
        "swallows the error": (Swallows, "does not come out of the `with` block"),
        "a flag of the class": (FlagOfTheClass, "another model sends nothing either"),
        "counts inside": (CountsInside, "who counts inside no_sync()?"),
    },
)

# ---- 5.4 clipping


def clipped_step(model, optimizer, inputs, targets, max_norm):
    optimizer.zero_grad()
    gpt.loss(model.module(inputs), targets).backward()
    model.finish_gradient_sync()
    squares = [param.grad.square().sum() for param in model.module.parameters()]
    norm = torch.stack(squares).sum().sqrt()
    if norm > max_norm:
        for param in model.module.parameters():
            param.grad *= max_norm / norm
    optimizer.step()
    return norm


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


def steps(model, optimizer, inputs, targets, before=None, after=None, zero=True):
    """Forward, backward, average and step, with something before and after the average."""
    if zero:
        optimizer.zero_grad()
    gpt.loss(model.module(inputs), targets).backward()
    norm = before(model.module) if before else None
    model.finish_gradient_sync()
    norm = after(model.module) if after else norm
    optimizer.step()
    return norm


def norm_of(module):
    return torch.cat([param.grad.flatten() for param in module.parameters()]).norm()


def clip(module, max_norm, always=False):
    norm = norm_of(module)
    if norm > max_norm or always:
        for param in module.parameters():
            param.grad *= max_norm / norm
    return norm


def clips_first(model, optimizer, inputs, targets, max_norm):
    optimizer.zero_grad()
    gpt.loss(model.module(inputs), targets).backward()
    norm = clip(model.module, max_norm)
    l05_by_hand.average_buckets(model.buckets, model.group)
    model.under_way.clear()
    model.missing = [len(bucket) for bucket in model.buckets]
    optimizer.step()
    return norm


def each_by_its_own_norm(model, optimizer, inputs, targets, max_norm):
    def each(module):
        norm = norm_of(module)
        for param in module.parameters():
            param.grad *= min(1.0, max_norm / param.grad.norm().item())
        return norm

    return steps(model, optimizer, inputs, targets, after=each)


def always_scales(model, optimizer, inputs, targets, max_norm):
    return steps(
        model, optimizer, inputs, targets, after=lambda module: clip(module, max_norm, always=True)
    )


def never_scales(model, optimizer, inputs, targets, max_norm):
    return steps(model, optimizer, inputs, targets, after=norm_of)


def norm_afterwards(model, optimizer, inputs, targets, max_norm):
    def clip_and_look(module):
        clip(module, max_norm)
        return norm_of(module)

    return steps(model, optimizer, inputs, targets, after=clip_and_look)


def sum_of_norms(model, optimizer, inputs, targets, max_norm):
    def by_sum(module):
        norm = sum(param.grad.norm() for param in module.parameters())
        for param in module.parameters():
            param.grad *= min(1.0, max_norm / norm.item())
        return norm

    return steps(model, optimizer, inputs, targets, after=by_sum)


def forgets_zero_grad(model, optimizer, inputs, targets, max_norm):
    return steps(
        model,
        optimizer,
        inputs,
        targets,
        after=lambda module: clip(module, max_norm),
        zero=False,
    )


def no_step(model, optimizer, inputs, targets, max_norm):
    optimizer.zero_grad()
    gpt.loss(model.module(inputs), targets).backward()
    model.finish_gradient_sync()
    return clip(model.module, max_norm)


def by_torch(model, optimizer, inputs, targets, max_norm):
    def by_library(module):
        return torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm)

    return steps(model, optimizer, inputs, targets, after=by_library)


def not_averaged(model, optimizer, inputs, targets, max_norm):
    optimizer.zero_grad()
    gpt.loss(model.module(inputs), targets).backward()
    norm = clip(model.module, max_norm)
    optimizer.step()
    return norm


def squares_over_ranks(model, optimizer, inputs, targets, max_norm):
    def over_ranks(module):
        square = norm_of(module) ** 2
        dist.all_reduce(square, group=model.group)
        norm = square.sqrt()
        if norm > max_norm:
            for param in module.parameters():
                param.grad *= max_norm / norm
        return norm

    return steps(model, optimizer, inputs, targets, after=over_ranks)


def no_root(model, optimizer, inputs, targets, max_norm):
    def square_of(module):
        clip(module, max_norm)
        return sum(param.grad.square().sum() for param in module.parameters())

    return steps(model, optimizer, inputs, targets, after=square_of)


def averages_twice(model, optimizer, inputs, targets, max_norm):
    def again(module):
        for param in module.parameters():
            dist.all_reduce(param.grad, group=model.group)
            param.grad /= model.group.size()
        return clip(module, max_norm)

    return steps(model, optimizer, inputs, targets, after=again)


def clips_by_value(model, optimizer, inputs, targets, max_norm):
    def by_value(module):
        norm = norm_of(module)
        for param in module.parameters():
            param.grad.clamp_(-max_norm, max_norm)
        return norm

    return steps(model, optimizer, inputs, targets, after=by_value)


def returns_the_loss(model, optimizer, inputs, targets, max_norm):
    optimizer.zero_grad()
    loss = gpt.loss(model.module(inputs), targets)
    loss.backward()
    model.finish_gradient_sync()
    clip(model.module, max_norm)
    optimizer.step()
    return loss


def without_return(model, optimizer, inputs, targets, max_norm):
    clipped_step(model, optimizer, inputs, targets, max_norm)


CLIPPED = Answers(
    check=l05.clipped,
    right={"squares": clipped_step, "floats": with_floats, "one row": with_one_row},
    wrong={
        "clips before the average": (clips_first, "take it after the average"),
        "each by its own norm": (each_by_its_own_norm, "do all parameters have the same factor"),
        "always scales": (always_scales, "10 times as long as it should be"),
        "never scales": (never_scales, "not clipped"),
        "the norm afterwards": (norm_afterwards, "the norm after clipping"),
        "a sum of norms": (sum_of_norms, "the sum of the norms of all parameters"),
        "no root": (no_root, "the square of the norm"),
        "not averaged": (not_averaged, "the gradient of this rank's own share"),
        "squares over the ranks": (squares_over_ranks, "sqrt(4) times the norm"),
        "zero_grad forgotten": (forgets_zero_grad, "what is in `.grad` when it begins?"),
        "no step": (no_step, "who makes the step?"),
        "PyTorch's own": (by_torch, "take the norm yourself"),
        "averages twice": (averages_twice, "when finish_gradient_sync returns?"),
        "clips by value": (clips_by_value, "it limits the norm of all of them together"),
        "the loss": (returns_the_loss, "which is the loss"),
        "no return": (without_return, "it returned None"),
    },
)

# ---- 5.5 a hook that compresses


def compress(group, bucket):
    full = bucket.buffer()
    half = (full / group.size()).bfloat16()
    work = dist.all_reduce(half, group=group, async_op=True)
    return work.get_future().then(lambda done: full.copy_(done.value()[0]))


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


def sent(tensor, group):
    return dist.all_reduce(tensor, group=group, async_op=True).get_future()


def hook_sum(group, bucket):
    return sent(bucket.buffer().bfloat16(), group).then(lambda done: done.value()[0].float())


def hook_full(group, bucket):
    return sent(bucket.buffer() / group.size(), group).then(lambda done: done.value()[0])


def hook_float16(group, bucket):
    half = (bucket.buffer() / group.size()).half()
    return sent(half, group).then(lambda done: done.value()[0].float())


def hook_list(group, bucket):
    half = (bucket.buffer() / group.size()).bfloat16()
    return sent(half, group).then(lambda done: done.value())


def hook_future_of_all_reduce(group, bucket):
    return sent((bucket.buffer() / group.size()).bfloat16(), group)


def hook_other_name(group, gradients):
    return compress(group, gradients)


def hook_waits(group, bucket):
    half = (bucket.buffer() / group.size()).bfloat16()
    dist.all_reduce(half, group=group)
    future = torch.futures.Future()
    future.set_result(half.float())
    return future


def hook_tensor(group, bucket):
    half = (bucket.buffer() / group.size()).bfloat16()
    dist.all_reduce(half, group=group)
    return half.float()


def hook_world(group, bucket):
    half = (bucket.buffer() / dist.get_world_size()).bfloat16()
    return sent(half, None).then(lambda done: done.value()[0].float())


def hook_one_for_each_gradient(group, bucket):
    rows = [gradient.to(torch.bfloat16) / group.size() for gradient in bucket.gradients()]
    futures = [sent(row, group) for row in rows]

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

    return sent(row, group).then(hand_out)


def hook_by_torch(group, bucket):
    return bf16_compress_hook(group, bucket)


def hook_without_return(group, bucket):
    compress(group, bucket)


COMPRESSED = Answers(
    check=l05.compress,
    right={
        "divides before": compress,
        "divides afterwards": divides_afterwards,
        "into the buffer": with_state,
        "gradient by gradient in one row": hook_by_gradients,
    },
    wrong={
        "a sum": (hook_sum, "4 times as long as the mean"),
        "full precision": (hook_full, "torch.float32 travelled"),
        "half precision": (hook_float16, "torch.float16 travelled"),
        "a list": (hook_list, "the Future holds a list"),
        "no then": (hook_future_of_all_reduce, "the Future holds a list"),
        "another name": (hook_other_name, "parameters (state, bucket)"),
        "waits": (hook_waits, "the hook waits for the all-reduce"),
        "a tensor": (hook_tensor, "it returned a Tensor"),
        "forgets the group": (hook_world, "ranks outside of the group"),
        "one for each gradient": (hook_one_for_each_gradient, "all-reduces for one bucket"),
        "functional collectives": (hook_functional, "not by `dist.all_reduce`"),
        "PyTorch's own": (hook_by_torch, "PyTorch's own hook would do"),
        "no return": (hook_without_return, "it returned None"),
    },
)

ANSWERS = {
    "5.1": BUCKETS,
    "5.2": OVERLAPPED,
    "5.3": QUIET,
    "5.4": CLIPPED,
    "5.5": COMPRESSED,
}
