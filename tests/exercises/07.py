"""Answers to the exercises of lesson 07, the DDP clinic."""

import atexit
import functools
import heapq
import math
import time
import zlib
from datetime import timedelta

import torch
import torch.distributed as dist
from answers import Answers, changed

from course.labs import l07_clinic
from course.pool.ranks import Ranks

# ---- 7.1 who is different


def by_tensors(value, group):
    own = torch.tensor([value], dtype=torch.float64)
    parts = [torch.zeros_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own, group=group)
    return [rank for rank in range(len(parts)) if not torch.equal(parts[rank], parts[0])]


def by_a_row(value, group):
    row = torch.zeros(group.size(), dtype=torch.float64)
    row[group.rank()] = value
    dist.all_reduce(row, group=group)
    return torch.nonzero(row != row[0]).flatten().tolist()


def in_float32(value, group):
    own = torch.tensor([float(value)])
    parts = [torch.zeros(1) for _ in range(group.size())]
    dist.all_gather(parts, own, group=group)
    return [rank for rank in range(len(parts)) if parts[rank] != parts[0]]


DIFFERING = Answers(
    solves="ranks_that_differ",
    right={"tensors": by_tensors, "a row that is summed": by_a_row},
    wrong={
        "in the world": (
            changed("get_world_size(group) => get_world_size()", "value, group=group => value"),
            "with ranks 0-3 it is right",
        ),
        "numbers of the world": (
            changed("append(rank) => append(dist.get_global_rank(group, rank))"),
            "are these numbers in the world, not in the group?",
        ),
        "the equal ones": (changed("other != => other =="), "the ones that agree"),
        "only whether": (
            changed("return different => return len(different) > 0"),
            "expected is a list of ranks",
        ),
        "in 32 bits": (in_float32, "in the 16th digit"),
        "on the first only": (
            changed("return different => return different if group.rank() == 0 else None"),
            "it returned None",
        ),
        "never any": (changed("return different => return []"), "the last one differs"),
        "unlike mine": (changed("other != values[0] => other != value"), "where"),
    },
)

# ---- 7.2 the chart


class Checksums:
    """A checksum of the bytes of the inputs."""

    def __init__(self, model, optimizer, loader=None):
        self.model = model
        self.optimizer = optimizer
        self.inputs = []
        self.weights = []
        self.gradients = []

    def __enter__(self):
        first = self.model.register_forward_pre_hook(self.note_inputs)
        second = self.optimizer.register_step_pre_hook(self.note_step)
        self.handles = [first, second]
        return self

    def __exit__(self, *error):
        for handle in self.handles:
            handle.remove()

    def note_inputs(self, model, inputs):
        self.inputs.append(zlib.crc32(inputs[0].numpy().tobytes()))

    def note_step(self, optimizer, args, kwargs):
        params = list(self.model.parameters())
        self.weights.append(sum(param.detach().abs().sum().item() for param in params))
        norms = [param.grad.norm() for param in params if param.grad is not None]
        self.gradients.append(torch.stack(norms).norm().item())


class ByPosition(Checksums):
    """Each number counts by its position; the norm is the one that clipping returns."""

    def note_inputs(self, model, inputs):
        flat = inputs[0].flatten().double()
        self.inputs.append((flat * torch.arange(1, len(flat) + 1)).sum().item())

    def note_step(self, optimizer, args, kwargs):
        flat = torch.nn.utils.parameters_to_vector(self.model.parameters())
        self.weights.append(zlib.crc32(flat.detach().numpy().tobytes()))
        self.gradients.append(
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), math.inf).item()
        )


class ByLabcode(l07_clinic.Chart):
    pass


NUMBERS = "numbers = inputs[0].flatten().tolist()"
NUMBER = "hash(tuple(numbers))"
RANDOM_WEIGHTS = """torch.manual_seed(0)
        flat = inputs[0].flatten()
        numbers = (flat * torch.rand(len(flat))).tolist()"""

CHART = Answers(
    solves="Chart",
    right={"checksums": Checksums, "by position": ByPosition},
    wrong={
        "plain sum": (
            changed(f"{NUMBER} => sum(numbers)"),
            "in another order got the same number",
        ),
        "sum of rows": (
            changed("inputs[0].flatten() => inputs[0].sum(1)"),
            "the features of its samples in another order",
        ),
        "by identity": (changed(f"{NUMBER} => id(inputs[0])"), "forward passes 0 and 3"),
        "after the step": (
            changed("register_step_pre_hook => register_step_post_hook"),
            "when did you look?",
        ),
        "hooks stay": (changed("handle.remove() => pass"), "who removes the hooks?"),
        "enter without return": (changed("return self => pass"), "return self"),
        "nothing registered": (
            changed(
                "self.model.register_forward_pre_hook(self.note_inputs) => None",
                "[first, second] => [second]",
            ),
            "is the hook registered, and does it append",
        ),
        "a frozen parameter": (changed("if param.grad is not None => if True"), "NoneType"),
        "no root": (changed("squares**0.5 => squares"), "that is its square"),
        "sum of norms": (
            changed("grad.double().square().sum() => grad.norm()", "squares**0.5 => squares"),
            "one root over the squares",
        ),
        "the last layer": (changed("weights += => weights ="), "one weight of parameter 0"),
        "a number for each parameter": (
            changed(
                "self.weights.append(weights) => pass",
                "squares = 0.0 => squares = 0.0\n        note = self.weights.append",
                "weights += param.detach().double().abs().sum().item() => note(param.sum().item())",
            ),
            "one for each optimizer step",
        ),
        "tensors": (changed(f"{NUMBER} => inputs[0]"), "plain numbers can be sent"),
        "labcode's": (ByLabcode, "labcode's own"),
        "swallows errors": (
            changed("handle.remove() => handle.remove()\n        return True"),
            "what does __exit__ return?",
        ),
        "clips": (
            changed(
                "squares**0.5 => "
                "torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0).item()"
            ),
            "which call in note_step writes into gradients",
        ),
        "returns zeros": (
            changed(f"{NUMBER}) => {NUMBER})\n        return inputs[0] * 0"),
            "what does note_inputs return",
        ),
        "hooks from the start": (
            changed(
                "self.gradients = [] => self.gradients = []\n        self.begin()",
                "def __enter__(self): => "
                "def __enter__(self):\n        return self\n\n    def begin(self):",
            ),
            "before the block has begun",
        ),
        "squares in place": (
            changed("grad.double().square() => grad.square_()"),
            "which call in note_step writes into gradients",
        ),
        "seeds the generator": (
            changed(f"{NUMBERS} => {RANDOM_WEIGHTS}"),
            "note_inputs draws random numbers",
        ),
        "with its rank": (
            changed(f"{NUMBER} => {NUMBER} + dist.get_rank()"),
            "all ranks were given the same inputs",
        ),
        "hash of the bytes": (
            changed(f"{NUMBER} => hash(inputs[0].numpy().tobytes())"),
            "Python's hash of a text or of bytes differs",
        ),
        "hash of the text": (
            changed(f"{NUMBER} => hash(str(inputs[0]))"),
            "Python's hash of a text or of bytes differs",
        ),
        "in eval mode": (changed(f"{NUMBERS} => model.eval()\n        {NUMBERS}"), "eval mode"),
    },
)

# ---- cures: the scripts that the solution has mended, with faults put back or in


@functools.cache
def _pair():
    pair = Ranks(2)
    atexit.register(pair.close)
    return pair


def cures(scripts, ranks):
    """The check cell of some patients, or of one."""
    return (_pair(), *scripts) if isinstance(scripts, tuple) else (_pair(), scripts)


WATCHED = "with watch(model, optimizer, loader=loader):"

# ---- 7.3 data


def mended(watch):
    """A script that has another name than the patient."""


SAMPLER = "DistributedSampler(data, shuffle=False)"
LOADER = f"sampler = {SAMPLER}\n    loader = DataLoader(data, batch_size=32, sampler=sampler)"
SHUFFLED = "DistributedSampler(data)\n"  # patient 2
SET_EPOCH = "sampler.set_epoch(epoch)"
EVERY_SECOND = "range(dist.get_rank(), len(data), dist.get_world_size())"
BY_THE_GROUP = "num_replicas=dist.get_world_size(), rank=dist.get_rank(), shuffle=False"
SEEN = "orders.append(torch.cat(seen))"

DATA = Answers(
    solves=("patient_1", "patient_2"),
    takes_ranks=False,
    real=True,
    cell=cures,
    right={
        "with all arguments, epochs from 1": changed(
            f"{SAMPLER} => DistributedSampler(data, {BY_THE_GROUP})",
            "set_epoch(epoch) => set_epoch(epoch + 1)",
        ),
        "every second sample, every second epoch": changed(
            f"{SAMPLER} => {EVERY_SECOND}", "set_epoch(epoch) => set_epoch(epoch=2 * epoch)"
        ),
    },
    wrong={
        "1 as it came": (changed(f"{SAMPLER} => None"), "patient 1: the doctor says, same data"),
        "2 as it came": (
            changed(f"{SET_EPOCH} => pass"),
            "patient 2: the doctor says, set_epoch forgotten",
        ),
        "shuffled without a share": (
            changed(f"{LOADER} => loader = DataLoader(data, batch_size=32, shuffle=True)"),
            "same data",
        ),
        "half the batch instead": (
            changed(f"{LOADER} => loader = DataLoader(data, batch_size=16)"),
            "same data",
        ),
        "another name": ((mended, mended), "keep its name"),
        "nobody watches": (changed(f"{WATCHED} => if True:"), "keep `with watch(...)`"),
        "no return": (changed("return num_batches => print(num_batches)"), "it returned None"),
        "returns the batches": (
            changed("return num_batches => return list(loader)"),
            "it returned a list, expected is a number",
        ),
        "shuffled too": (
            changed("data, shuffle=False => data"),
            "patient 1, rank 0: forward pass 0 got other samples",
        ),
        "halves": (
            changed(f"{SAMPLER} => range(256 * dist.get_rank(), 256 * dist.get_rank() + 256)"),
            "which samples belong to this rank?",
        ),
        "another epoch on each rank": (
            changed("set_epoch(epoch) => set_epoch(epoch + dist.get_rank())"),
            "samplers disagree",
        ),
        "another seed on each rank": (
            changed(f"{SHUFFLED} => DistributedSampler(data, seed=dist.get_rank())\n"),
            "samplers disagree",
        ),
        "set after the batches": (
            changed(
                f"{SET_EPOCH} => pass",
                f"{SEEN} => {SEEN}\n            {SET_EPOCH}",
            ),
            "set_epoch forgotten",
        ),
    },
)

# ---- 7.4 weights

XAVIER = "torch.nn.init.xavier_normal_(layers[2].weight)"
WRAPPED_LAST = f"{XAVIER}\n    model = DDP(layers)"
WRAPPED_FIRST = f"model = DDP(layers)\n    {XAVIER}"  # as it came
HEAD_FIRST = "body[4] = head\n    model = DDP(body)"
HEAD_LAST = "model = DDP(body)\n    body[4] = head"
SENT = "dist.broadcast(model.module[2].weight.data, 0)"

WEIGHTS = Answers(
    solves=("patient_5", "patient_6"),
    takes_ranks=False,
    real=True,
    cell=cures,
    right={
        "wrapped again": changed(
            f"{WRAPPED_LAST} => {WRAPPED_FIRST}\n    model = DDP(model.module)",
            f"{HEAD_FIRST} => {HEAD_LAST}\n    model = DDP(model.module)",
        ),
        "sent after the change, and a new body": changed(
            f"{WRAPPED_LAST} => {WRAPPED_FIRST}\n    {SENT}",
            "body[4] = head => body = torch.nn.Sequential(*body[:4], head)",
        ),
    },
    wrong={
        "5 as it came": (changed(f"{WRAPPED_LAST} => {WRAPPED_FIRST}"), "different weights"),
        "6 as it came": (changed(f"{HEAD_FIRST} => {HEAD_LAST}"), "changed after wrapping"),
        "as the error advises": (
            changed(
                f"{HEAD_FIRST} => {HEAD_LAST}",
                "DDP(body) => DDP(body, find_unused_parameters=True)",
            ),
            "changed after wrapping",
        ),
        "no Xavier": (changed(f"{XAVIER} => pass"), "not those of the healthy run"),
        "weights sent at the end": (
            changed(
                f"{WRAPPED_LAST} => {WRAPPED_FIRST}",
                f"return apart => {SENT}\n    return apart",
            ),
            "different weights",
        ),
        "one seed for all": (
            changed(
                f"{WRAPPED_LAST} => {WRAPPED_FIRST}",
                "manual_seed(dist.get_rank()) => manual_seed(0)",
            ),
            "with one seed for all the fault is still there",
        ),
        "a DDP in a DDP": (
            changed(f"{WRAPPED_LAST} => {WRAPPED_FIRST}\n    model = DDP(model)"),
            "a DDP inside the DDP",
        ),
        "the old head is trained": (
            changed(
                "body[4] = head => parameters = list(body.parameters())\n    body[4] = head",
                "model = DDP(layers) => model = DDP(layers)\n    parameters = layers.parameters()",
                "SGD(model.parameters() => SGD(parameters",
            ),
            "other parameters",
        ),
        "only the body is wrapped": (
            changed(
                "model = DDP(body) => model = torch.nn.Sequential(DDP(body[:4]), head)",
            ),
            "weights drift",
        ),
    },
)

# ---- 7.5 gradients

DIVIDED = "loss = loss / 4"  # patient 3
SUMMED = 'losses = cross_entropy(model(inputs), targets, reduction="sum")'
OVER_ALL = "loss = losses * dist.get_world_size() / num_targets"
COUNTED = """for _, targets in micro_batches:
                num_targets += (targets != IGNORED).sum()
            dist.all_reduce(num_targets)
"""
GATHERED = """counts = [None] * dist.get_world_size()
            own = sum(int((targets != IGNORED).sum()) for _, targets in micro_batches)
            dist.all_gather_object(counts, own)
            num_targets = sum(counts)
"""
AS_MEANS = """valid = (targets != IGNORED).sum()
                losses = cross_entropy(model(inputs), targets) * valid
"""
OF_THIS_ONE = """num_targets = (targets != IGNORED).sum()
                dist.all_reduce(num_targets)
                losses = cross_entropy(model(inputs), targets, reduction="sum") / 2
"""
SO_FAR = """num_targets += (targets != IGNORED).sum()
                total = num_targets.clone()
                dist.all_reduce(total)
                losses = cross_entropy(model(inputs), targets, reduction="sum")
"""

GRADIENTS = Answers(
    solves=("patient_3", "patient_8"),
    takes_ranks=False,
    real=True,
    cell=cures,
    right={
        "means times their counts": changed(
            f"{DIVIDED} => loss = 0.25 * loss",
            f"{SUMMED}\n => {AS_MEANS}",
        ),
        "counts gathered": changed(f"{DIVIDED} => loss /= 4", f"{COUNTED} => {GATHERED}"),
        "divided by a rank's part": changed(
            f"{OVER_ALL} => loss = losses / (num_targets / dist.get_world_size())"
        ),
    },
    wrong={
        "3 as it came": (changed(f"{DIVIDED} => pass"), "1/m missing"),
        "8 as it came": (
            changed(
                f"{COUNTED} => pass\n",
                f"{SUMMED} => losses = cross_entropy(model(inputs), targets)",
                f"{OVER_ALL} => loss = losses / 2",
            ),
            "mean of means",
        ),
        "a smaller rate": (changed(f"{DIVIDED} => pass", "lr=0.1 => lr=0.025"), "1/m missing"),
        "divided by 2": (
            changed(f"{DIVIDED} => loss = loss / 2"),
            "patient 3, rank 0: it returned",
        ),
        "ranks forgotten": (
            changed("losses * dist.get_world_size() => losses"),
            "patient 8: the doctor says, averaged twice",
        ),
        "the own count": (
            changed("dist.all_reduce(num_targets) => pass"),
            "mean of means",
        ),
        "the count of the first step": (
            changed("size() / num_targets => size() / 64"),
            "patient 8, rank 0: it returned",
        ),
        "padding counted too": (
            changed("(targets != IGNORED).sum() => len(targets)"),
            "patient 8, rank 0: it returned",
        ),
        "a count for each micro-batch": (
            changed(f"{COUNTED} => pass\n", f"{SUMMED}\n => {OF_THIS_ONE}"),
            "patient 8, rank 0: it returned",
        ),
        "the count so far": (
            changed(
                f"{COUNTED} => pass\n",
                f"{SUMMED}\n => {SO_FAR}",
                "size() / num_targets => size() / total",
            ),
            "mean of means",
        ),
        "counted on rank 0 alone": (
            changed(
                "dist.all_reduce(num_targets) => "
                "if dist.get_rank() == 0: dist.all_reduce(num_targets)"
            ),
            "patient 8: the doctor says, skipped call",
        ),
        "no padding": (
            changed("data = padded_samples() => data = text_samples(512)"),
            "patient 8, rank 0: it returned",
        ),
    },
)

# ---- 7.6 the roll call


def waiting_for_all(store, name, rank, num_ranks, limit_s):
    notes = [f"{name}/{other}" for other in range(num_ranks)]
    store.set(notes[rank], "")
    try:
        store.wait(notes, timedelta(seconds=limit_s))
    except RuntimeError:
        return [other for other, note in enumerate(notes) if not store.check([note])]
    return []


def looking_again(store, name, rank, num_ranks, limit_s):
    store.set(f"{name}/{rank}", "1")
    end = time.perf_counter() + limit_s
    missing = set(range(num_ranks))
    while missing and time.perf_counter() < end:
        missing = {other for other in missing if not store.check([f"{name}/{other}"])}
        time.sleep(0.01)
    return sorted(missing)


def by_a_count(store, name, rank, num_ranks, limit_s):
    store.add(name, 1)
    end = time.monotonic() + limit_s
    while time.monotonic() < end and store.add(name, 0) < num_ranks:
        time.sleep(0.01)
    return list(range(store.add(name, 0), num_ranks))


NOTE = 'f"{name}/{rank}"'
OTHER_NOTE = 'f"{name}/{other}"'
SUPPRESS = "with suppress(RuntimeError):  # it is asked again below"

ROLL_CALL = Answers(
    solves="roll_call",
    real=True,
    right={
        "all at once": waiting_for_all,
        "looking again": looking_again,
        "by get, with its time-out": changed(
            "store.wait([note], timedelta(seconds=left_s)) => "
            "store.set_timeout(timedelta(seconds=left_s)), store.get(note)"
        ),
    },
    wrong={
        "a limit for each": (
            changed("left_s = deadline - time.monotonic() => left_s = limit_s"),
            "the limit is for all of them together",
        ),
        "looking once": (
            changed("if left_s > 0: => if False:"),
            "as the absent ones, expected is []",
        ),
        "the error passes": (
            changed(f"{SUPPRESS} => if True:"),
            "it waited for something that no rank put",
        ),
        "those who came": (
            changed("if not store.check => if store.check"),
            "as the absent ones, expected is []",
        ),
        "one note for all": (
            changed(f"{NOTE} => name", f"{OTHER_NOTE} => name"),
            "rank 2 does not come",
        ),
        "only how many": (
            changed("return missing => return len(missing)"),
            "expected is a list of ranks",
        ),
        "the name ignored": (
            changed(f"{NOTE} => str(rank)", f"{OTHER_NOTE} => str(other)"),
            "was at an earlier point",
        ),
        "in milliseconds": (
            changed("+ limit_s => + limit_s / 1000"),
            "rank 2 comes late, but in time",
        ),
        "from rank 1 on": (
            changed("in range(num_ranks) => in range(1, num_ranks)"),
            "where rank 0 does not come",
        ),
        "by a count": (by_a_count, "as the absent ones, expected is [2]"),
        "sleeps": (
            changed("missing = [] => missing = []\n    time.sleep(limit_s)"),
            "though nobody is absent",
        ),
        "below zero": (
            changed("if left_s > 0: => time.sleep(0.05)\n        if True:"),
            "time-out is below zero never ends",
        ),
        "below zero, for who catches all": (
            changed(
                "if left_s > 0: => time.sleep(0.05)\n        if True:",
                "suppress(RuntimeError) => suppress(Exception)",
            ),
            "time-out is below zero never ends",
        ),
        "no limit": (changed("[note], timedelta(seconds=left_s) => [note]"), "without a time-out"),
        "by get": (
            changed("store.wait([note], timedelta(seconds=left_s)) => store.get(note)"),
            "it knows nothing of a limit",
        ),
    },
)

# ---- 7.7 trainings that stand still

MEAN = "mean = loss.detach().clone()\n            dist.all_reduce(mean)"
RANK_0 = "if dist.get_rank() == 0:\n                "
WAITING = Answers(
    solves=("patient_11", "patient_15"),
    takes_ranks=False,
    real=True,
    cell=cures,
    right={
        "in other words": changed(
            "all_reduce(mean) => all_reduce(mean, op=dist.ReduceOp.SUM)",
            "end = len(data) => end = 512",
        ),
        "by a sampler": changed(
            "loss.detach().clone() => loss.data.clone()",
            "range(dist.get_rank(), end, 2) => DistributedSampler(data, shuffle=False)",
        ),
    },
    wrong={
        "11 as it came": (
            changed(
                f"{MEAN} => {RANK_0}mean = loss.detach()\n                dist.all_reduce(mean)"
            ),
            "patient 11: the doctor says, skipped call",
        ),
        "15 as it came": (
            changed("end = len(data) => end = len(data) - 128 * dist.get_rank()"),
            "patient 15: the doctor says, skipped call",
        ),
        "the loss of each rank": (
            changed("dist.all_reduce(mean) => pass"),
            "patient 11, rank 0: it returned",
        ),
        "to rank 0 only": (
            changed("all_reduce(mean) => reduce(mean, 0)"),
            "patient 11, rank 1: it returned",
        ),
        "a barrier elsewhere": (
            changed(
                f"{MEAN} => {RANK_0}mean = loss.detach()\n                dist.all_reduce(mean)\n"
                "            else:\n                dist.barrier()"
            ),
            "calls do not match",
        ),
        "shuffled": (
            changed("range(dist.get_rank(), end, 2) => DistributedSampler(data)"),
            "patient 15, rank 0: forward pass 0 got other samples",
        ),
        "the same samples on both": (
            changed("range(dist.get_rank(), end, 2) => range(0, end, 2)"),
            "same data",
        ),
        "six batches for all": (
            changed("in loader: => in list(loader)[:6]:"),
            "optimizer steps",
        ),
    },
)

# ---- 7.9 fair shares


def with_a_heap(sample_s, global_batch):
    counts = [0] * len(sample_s)
    heap = [(seconds, rank) for rank, seconds in enumerate(sample_s)]
    heapq.heapify(heap)
    for _ in range(global_batch):
        ready_s, rank = heapq.heappop(heap)
        counts[rank] += 1
        heapq.heappush(heap, (ready_s + sample_s[rank], rank))
    return counts


def by_speed_then_one_by_one(sample_s, global_batch):
    speed = sum(1 / s for s in sample_s)
    counts = [math.floor(global_batch / s / speed + 1e-9) for s in sample_s]
    while sum(counts) < global_batch:
        rank = min(range(len(counts)), key=lambda r: (counts[r] + 1) * sample_s[r])
        counts[rank] += 1
    return counts


def all_alike(sample_s, global_batch):
    return [global_batch // len(sample_s)] * len(sample_s)


def by_seconds(sample_s, global_batch):
    counts = [int(global_batch * s / sum(sample_s)) for s in sample_s]
    counts[0] += global_batch - sum(counts)
    return counts


def rounded(sample_s, global_batch):
    speed = sum(1 / s for s in sample_s)
    return [round(global_batch / s / speed) for s in sample_s]


def the_rest_to_the_first(sample_s, global_batch):
    speed = sum(1 / s for s in sample_s)
    counts = [int(global_batch / s / speed) for s in sample_s]
    counts[0] += global_batch - sum(counts)
    return counts


def fractions(sample_s, global_batch):
    speed = sum(1 / s for s in sample_s)
    return [global_batch / s / speed for s in sample_s]


def for_two_ranks(sample_s, global_batch):
    first = round(global_batch * sample_s[-1] / (sample_s[0] + sample_s[-1]))
    return [first, global_batch - first]


SHARES = Answers(
    solves="shares",
    takes_ranks=False,
    right={"with a heap": with_a_heap, "by speed, then one by one": by_speed_then_one_by_one},
    wrong={
        "all alike": (all_alike, "is possible"),
        "by seconds": (by_seconds, "is possible"),
        "rounded": (rounded, "samples and not"),
        "the rest to the first": (the_rest_to_the_first, "is possible"),
        "fractions": (fractions, "samples are whole"),
        "the fastest alone": (changed("(count + 1) * seconds => seconds"), "is possible"),
        "ready now": (changed("(count + 1) * seconds => count * seconds"), "is possible"),
        "sorts its argument": (
            changed("counts = [0] => sample_s.sort()\n    counts = [0]"),
            "has changed the list",
        ),
        "for two ranks": (for_two_ranks, "one number for each of the 3 ranks"),
        "whole floats": (
            changed("return counts => return [float(count) for count in counts]"),
            "of type int",
        ),
    },
)

# ---- 7.8 five faults in one script

FOURTH = "cross_entropy(model(inputs), targets) / 4"
UNDIVIDED = "cross_entropy(model(inputs), targets)"
SWITCH = "model.require_backward_grad_sync = is_last"
SAVE = 'torch.save(model.module.state_dict(), "runs/night.pt")'
BY_RANK_0 = f"if dist.get_rank() == 0:\n                {SAVE}"
SEARCH = "DDP(small_model()) => DDP(small_model(), find_unused_parameters=True)"

NIGHT = Answers(
    solves="night_shift",
    takes_ranks=False,
    real=True,
    cell=cures,
    right={
        "an average at the end": changed(
            f"{FOURTH} => {UNDIVIDED}",
            "loss.backward() => (loss * 0.25).backward()",
        ),
        "saved before a barrier, epochs from 1": changed(
            f"{BY_RANK_0} => {BY_RANK_0}\n            dist.barrier()",
            "set_epoch(epoch) => set_epoch(epoch + 1)",
        ),
    },
    wrong={
        "as it came": (
            changed(
                f"{SET_EPOCH} => pass",
                f"{FOURTH} => {UNDIVIDED}",
                f"{SWITCH} => pass",
                f"{BY_RANK_0} => {SAVE}",
                SEARCH,
            ),
            "0 of 5 faults are gone",
        ),
        "set_epoch forgotten": (changed(f"{SET_EPOCH} => pass"), "4 of 5 faults are gone"),
        "not divided": (changed(f"{FOURTH} => {UNDIVIDED}"), "1/m missing"),
        "sent at each backward": (changed(f"{SWITCH} => pass"), "2.235e+05 B a step too much"),
        "sent at each backward, in two lines": (
            changed(
                f"{SWITCH} => pass",
                f"loss = {FOURTH}\n                loss.backward() => if is_last:\n"
                f"                    ({FOURTH}).backward()\n"
                "                else:\n"
                f"                    ({FOURTH}).backward()",
            ),
            "2.235e+05 B a step too much",  # three of four
        ),
        "sent at each backward, two in a line": (
            changed(
                f"{SWITCH} => pass",
                f"loss = {FOURTH}\n                loss.backward() => "
                "half = len(inputs) // 2\n"
                "                one, two = (inputs[:half], targets[:half]), "
                "(inputs[half:], targets[half:])\n"
                "                for inputs, targets in (one, two): "
                "(cross_entropy(model(inputs), targets) / 8).backward()",
            ),
            "5.215e+05 B a step too much",  # seven of eight
        ),
        "sent at all but the last": (
            changed("sync = is_last => sync = not is_last"),
            "and of the last one outside",
        ),
        "forward outside of no_sync": (
            changed(
                f"{SWITCH} => pass",
                f"{FOURTH}\n                loss.backward() => {FOURTH}\n"
                "                if is_last:\n"
                "                    loss.backward()\n"
                "                else:\n"
                "                    with model.no_sync():\n"
                "                        loss.backward()",
            ),
            "forward and backward of all micro-batches but the last",
        ),
        "not divided, in two lines": (
            changed(
                f"{SWITCH} => pass",
                f"loss = {FOURTH}\n                loss.backward() => if is_last:\n"
                f"                    {UNDIVIDED}.backward()\n"
                "                else:\n"
                "                    with model.no_sync():\n"
                f"                        {UNDIVIDED}.backward()",
            ),
            "3 times too large from one line of code alone",
        ),
        "saved by all": (changed(f"{BY_RANK_0} => {SAVE}"), "saved by all"),
        "still searching": (changed(SEARCH), "search unneeded"),
        "never saved": (changed(f"{BY_RANK_0} => pass"), "no rank saves a checkpoint any more"),
        "never sent": (changed("sync = is_last => sync = False"), "weights drift"),
        "another epoch on each rank": (
            changed("set_epoch(epoch) => set_epoch(epoch + dist.get_rank())"),
            "samplers disagree",
        ),
        "a smaller rate": (
            changed(f"{FOURTH} => {UNDIVIDED}", "lr=0.1 => lr=0.025"),
            "1/m missing",
        ),
        "gradients kept": (
            changed("optimizer.zero_grad() => pass"),
            "zero_grad missing",
        ),
    },
)

# ---- 7.11 homework

LAST_SENDS = """with model.no_sync():
                for inputs, targets in batches[first : first + 3]:
                    loss = cross_entropy(model(inputs), targets) / 4
                    loss.backward()
            inputs, targets = batches[first + 3]
            loss = cross_entropy(model(inputs), targets) / 4
            loss.backward()
"""
ALL_SEND = """for inputs, targets in batches[first : first + 4]:
                loss = cross_entropy(model(inputs), targets) / 4
                loss.backward()
"""
NONE_SENDS = """with model.no_sync():
                for inputs, targets in batches[first : first + 4]:
                    loss = cross_entropy(model(inputs), targets) / 4
                    loss.backward()
"""
SWITCHED = """for place in range(first, first + 4):
                inputs, targets = batches[place]
                model.require_backward_grad_sync = place == first + 3
                (cross_entropy(model(inputs), targets) / 4).backward()
"""
AS_ONE_BATCH = """inputs = torch.cat([one for one, _ in batches[first : first + 4]])
            targets = torch.cat([one for _, one in batches[first : first + 4]])
            cross_entropy(model(inputs), targets).backward()
"""

HOMEWORK = Answers(
    solves=("patient_4", "patient_14"),
    takes_ranks=False,
    real=True,
    cell=cures,
    right={
        "switched, and both parts used": changed(
            f"{LAST_SENDS} => {SWITCHED}",
            "return self.one(inputs) => return self.one(inputs) + 0 * self.other(inputs)",
        ),
        "one large batch": changed(f"{LAST_SENDS} => {AS_ONE_BATCH}"),
    },
    wrong={
        "4 as it came": (changed(f"{LAST_SENDS} => {ALL_SEND}"), "no_sync missing"),
        "14 as it came": (
            changed("TwoWays(), find_unused_parameters=True => TwoWays()"),
            "unused parameters",
        ),
        "never sent": (changed(f"{LAST_SENDS} => {NONE_SENDS}"), "patient 4: the doctor says"),
        "a static graph": (
            changed("find_unused_parameters=True => static_graph=True"),
            "patient 14",
        ),
        "one part only": (
            changed("if self.step % 2 == 1: => if True:"),
            "patient 14",
        ),
        "the whole batch, not divided": (
            changed(f"{LAST_SENDS} => {ALL_SEND}", "targets) / 4 => targets)"),
            "patient 4: the doctor says",
        ),
    },
)

# ---- 7.10 BatchNorm over the samples of all ranks

DIMS = (0, 2)
Function = torch.autograd.Function


class MeanThenSquares(Function):
    """Three all-reduces in forward and two in backward, x kept in place of x_hat."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps, group):
        def over_ranks(values):
            values = values.clone()
            dist.all_reduce(values, op=dist.ReduceOp.SUM, group=group)
            return values

        m = over_ranks(torch.tensor(float(x[:, 0].numel()), dtype=x.dtype))
        mean = over_ranks(x.sum(dim=(0, 2), keepdim=True)) / m
        var = over_ranks(((x - mean) ** 2).sum(dim=(0, 2), keepdim=True)) / m
        ctx.save_for_backward(x, weight, mean, var, m)
        ctx.eps, ctx.group = eps, group
        return (x - mean) / (var + eps).sqrt() * weight.view(1, -1, 1) + bias.view(1, -1, 1)

    @staticmethod
    def backward(ctx, grad):
        x, weight, mean, var, m = ctx.saved_tensors
        std = (var + ctx.eps).sqrt()
        x_hat = (x - mean) / std
        d_bias = grad.sum(dim=(0, 2), keepdim=True)
        d_weight = (grad * x_hat).sum(dim=(0, 2), keepdim=True)
        first, second = d_bias.clone(), d_weight.clone()
        works = [dist.all_reduce(t, group=ctx.group, async_op=True) for t in (first, second)]
        for work in works:
            work.wait()
        dx = weight.view(1, -1, 1) / std * (grad - first / m - x_hat * second / m)
        return dx, d_weight.flatten(), d_bias.flatten(), None, None


class Gathered(Function):
    """Every rank gets the mean, variance and count of each other one."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps, group):
        flat = x.transpose(0, 1).flatten(1)  # [C, values]
        own = torch.stack([flat.mean(1), flat.var(1, correction=0)])
        own = torch.cat([own, torch.full_like(own[:1], flat.shape[1])])  # [3, C]
        parts = [torch.zeros_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, own, group=group)
        ctx.total = sum(part[2] for part in parts)
        mean = sum(part[2] * part[0] for part in parts) / ctx.total
        square = sum(part[2] * (part[1] + part[0] ** 2) for part in parts) / ctx.total
        ctx.scale = torch.rsqrt(square - mean**2 + eps)
        ctx.group = group
        x_hat = torch.einsum("ncl,c->ncl", x - mean[None, :, None], ctx.scale)
        ctx.save_for_backward(x_hat, weight)
        return torch.addcmul(bias[:, None], weight[:, None], x_hat)

    @staticmethod
    def backward(ctx, grad):
        x_hat, weight = ctx.saved_tensors
        own = torch.cat([grad.sum(DIMS), torch.einsum("ncl,ncl->c", grad, x_hat)])
        parts = [torch.zeros_like(own) for _ in range(ctx.group.size())]
        dist.all_gather(parts, own, group=ctx.group)
        bias_sum, weight_sum = torch.stack(parts).sum(0).chunk(2)
        grad_bias, grad_weight = own.chunk(2)
        total, scale = ctx.total[:, None], (weight * ctx.scale)[:, None]
        grad_x = scale * (grad - (bias_sum[:, None] + x_hat * weight_sum[:, None]) / total)
        return grad_x, grad_weight, grad_bias, None, None


def a_plain_function(x, weight, bias, eps, group):
    return torch.nn.functional.batch_norm(x, None, None, weight, bias, True, eps=eps)


FORWARD_SENDS = "dist.all_reduce(message, group=group)"
BACKWARD_SENDS = "dist.all_reduce(message, group=ctx.group)"
COUNT = "count = x.new_tensor([x.shape[0] * x.shape[2]])"
OF_ALL_SAMPLES = """parts = [None] * group.size()
        dist.all_gather_object(parts, x.detach(), group=group)
        batch = torch.cat(parts)
        count = x.new_tensor([batch.shape[0] * batch.shape[2]])"""
BY_LABCODE = """from labcode.parallel.batch_norm import WholeBatchNorm
        return WholeBatchNorm(group, x.shape[1], eps=eps, dtype=x.dtype)(x)"""

BATCH_NORM = Answers(
    solves="MySyncBatchNorm",
    right={
        "the mean, and then the squares": MeanThenSquares,
        "everybody's statistics gathered": Gathered,
    },
    wrong={
        "own statistics": (
            changed(f"{FORWARD_SENDS} => dist.all_reduce(message.clone(), group=group)"),
            "statistics of this rank's samples alone",
        ),
        "averages statistics": (
            changed(
                "sums = x.sum => sums = x.mean",
                "squares = x.square().sum(dim=(0, 2)) => squares = x.var((0, 2), correction=0)",
                "message[1:] / total => message[1:] / group.size()",
                "variance = mean_square - mean**2 => variance = mean_square",
            ),
            "the ranks' means differ too",
        ),
        "every rank counts alike": (
            changed(
                "sums = x.sum => sums = x.mean",
                "x.square().sum => x.square().mean",
                "message[1:] / total => message[1:] / group.size()",
            ),
            "every rank counts as much",
        ),
        "backward as if constants": (
            changed("grad - mean_grad[:, None] - x_hat * mean_product[:, None] => grad"),
            "as if mean and var were constants",
        ),
        "own sums in backward": (
            changed(f"{BACKWARD_SENDS} => total = grad.shape[0] * grad.shape[2]"),
            "in backward the sums go over this rank's samples",
        ),
        "own count in backward": (
            changed("means = message / total => means = message / grad[:, 0].numel()"),
            "by the number of this rank's values",
        ),
        "weight gradients of all": (
            changed(
                "message = torch.cat([grad_bias, grad_weight]) => "
                "dist.all_reduce(grad_bias, group=ctx.group)",
                f"{BACKWARD_SENDS} => dist.all_reduce(grad_weight, group=ctx.group)",
                "message / total => torch.cat([grad_bias, grad_weight]) / total",
            ),
            "is the sum over all ranks already",
        ),
        "nothing travels": (
            changed(f"{FORWARD_SENDS} => pass", f"{BACKWARD_SENDS} => pass"),
            "nothing travels in forward",
        ),
        "in the world": (
            changed(f"{FORWARD_SENDS} => dist.all_reduce(message)"),
            "with ranks 0-3 it is right",
        ),
        "gathers the batch": (
            changed(
                f"{COUNT} => {OF_ALL_SAMPLES}",
                "sums = x.sum => sums = batch.sum",
                "x.square() => batch.square()",
                f"{FORWARD_SENDS} => pass",
            ),
            "do samples travel",
        ),
        "one value less": (
            changed("mean_square - mean**2 => (mean_square - mean**2) * total / (total - 1)"),
            "divided by one value less",
        ),
        "no eps": (changed("variance + eps => variance"), "eps is missing"),
        "eps of its own": (changed("variance + eps => variance + 1e-5"), "take that of the call"),
        "eps outside of the root": (
            changed("torch.sqrt(variance + eps) => (torch.sqrt(variance) + eps)"),
            "eps is added to the root",
        ),
        "swapped": (
            changed("grad_x, grad_weight, grad_bias => grad_x, grad_bias, grad_weight"),
            "weight and bias are swapped",
        ),
        "no None": (
            changed("grad_bias, None, None => grad_bias"),
            "None for what has no gradient",
        ),
        "writes into x": (
            changed("x_hat = (x - mean[:, None]) => x -= mean[:, None]; x_hat = x"),
            "x has changed",
        ),
        "no return": (changed("return weight[:, None] => y = weight[:, None]"), "it returned None"),
        "labcode's": (changed(f"{COUNT} => {BY_LABCODE}"), "labcode's own"),
        "no Function": (a_plain_function, "hand in the class"),
        "no bias": (changed("* x_hat + bias[:, None] => * x_hat"), "where is bias?"),
        "negative variance": (
            changed("mean_square - mean**2 => mean**2 - mean_square"),
            "y has inf or nan",
        ),
    },
)

ANSWERS = {
    "7.1": DIFFERING,
    "7.2": CHART,
    "7.3": DATA,
    "7.4": WEIGHTS,
    "7.5": GRADIENTS,
    "7.6": ROLL_CALL,
    "7.7": WAITING,
    "7.8": NIGHT,
    "7.9": SHARES,
    "7.10": BATCH_NORM,
    "7.11": HOMEWORK,
}
