"""Answers to the exercises of lesson 07, the DDP clinic."""

import atexit
import contextlib
import functools
import heapq
import math
import time
import zlib
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from answers import Answers

from labcode.parallel.batch_norm import WholeBatchNorm
from labcode.pool.ranks import Ranks
from labcode.teach.exercises import l07
from labcode.teach.labs import l07_clinic
from tools.lesson_source import notebooks_of

# ---- 7.1 who is different


def by_objects(value, group):
    values = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return [rank for rank, other in enumerate(values) if other != values[0]]


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


def in_the_world(value, group):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return [rank for rank, other in enumerate(values) if other != values[0]]


def world_numbers(value, group):
    return [dist.get_global_rank(group, rank) for rank in by_objects(value, group)]


def the_equal_ones(value, group):
    different = by_objects(value, group)
    return [rank for rank in range(group.size()) if rank not in different]


def only_whether(value, group):
    return len(by_objects(value, group)) > 0


def in_float32(value, group):
    own = torch.tensor([float(value)])
    parts = [torch.zeros(1) for _ in range(group.size())]
    dist.all_gather(parts, own, group=group)
    return [rank for rank in range(len(parts)) if parts[rank] != parts[0]]


def on_the_first_only(value, group):
    values = [None] * group.size() if group.rank() == 0 else None
    dist.gather_object(value, values, dst=dist.get_global_rank(group, 0), group=group)
    if group.rank() != 0:
        return None
    return [rank for rank, other in enumerate(values) if other != values[0]]


def never_any(value, group):
    return []


def unlike_mine(value, group):
    values = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return [rank for rank, other in enumerate(values) if other != value]


DIFFERING = Answers(
    check=l07.differing,
    right={"objects": by_objects, "tensors": by_tensors, "a row that is summed": by_a_row},
    wrong={
        "in the world": (in_the_world, "with ranks 0, 1, 2 and 3 it is right"),
        "numbers of the world": (world_numbers, "with ranks 0, 1, 2 and 3 it is right"),
        "the equal ones": (the_equal_ones, "the ones that agree"),
        "only whether": (only_whether, "a list of ranks is wanted"),
        "in 32 bits": (in_float32, "in the 16th digit"),
        "on the first only": (on_the_first_only, "it returned None"),
        "never any": (never_any, "the last one differs"),
        "unlike mine": (unlike_mine, "where"),
    },
)

# ---- 7.2 the chart


class Chart:
    """What all charts below share."""

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


class ByPosition(Chart):
    def note_inputs(self, model, inputs):
        flat = inputs[0].flatten().double()
        self.inputs.append((flat * torch.arange(1, len(flat) + 1)).sum().item())

    def note_step(self, optimizer, args, kwargs):
        flat = torch.nn.utils.parameters_to_vector(self.model.parameters())
        self.weights.append(zlib.crc32(flat.detach().numpy().tobytes()))
        self.gradients.append(
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), math.inf).item()
        )


class ByTuples(Chart):
    def note_inputs(self, model, inputs):
        self.inputs.append(hash(tuple(inputs[0].flatten().tolist())))

    def __exit__(self, kind, error, trace):
        first, second = self.handles
        first.remove()
        second.remove()


class PlainSum(Chart):
    def note_inputs(self, model, inputs):
        self.inputs.append(inputs[0].sum().item())


class SumOfRows(Chart):
    def note_inputs(self, model, inputs):
        x = inputs[0].sum(1)
        self.inputs.append((x * torch.arange(1, len(x) + 1)).sum().item())


class ByIdentity(Chart):
    def note_inputs(self, model, inputs):
        self.inputs.append(id(inputs[0]))


class AfterTheStep(Chart):
    def __enter__(self):
        first = self.model.register_forward_pre_hook(self.note_inputs)
        second = self.optimizer.register_step_post_hook(self.note_step)
        self.handles = [first, second]
        return self


class NeverRemoved(Chart):
    def __exit__(self, *error):
        pass


class WithoutReturn(Chart):
    def __enter__(self):
        self.handles = [
            self.model.register_forward_pre_hook(self.note_inputs),
            self.optimizer.register_step_pre_hook(self.note_step),
        ]


class NothingRegistered(Chart):
    def __enter__(self):
        self.handles = []
        return self


class FrozenForgotten(Chart):
    def note_step(self, optimizer, args, kwargs):
        self.weights.append(sum(p.detach().abs().sum().item() for p in self.model.parameters()))
        squares = sum(param.grad.square().sum() for param in self.model.parameters())
        self.gradients.append(squares.sqrt().item())


class RootForgotten(Chart):
    def note_step(self, optimizer, args, kwargs):
        super().note_step(optimizer, args, kwargs)
        self.gradients[-1] **= 2


class SumOfNorms(Chart):
    def note_step(self, optimizer, args, kwargs):
        super().note_step(optimizer, args, kwargs)
        params = [param for param in self.model.parameters() if param.grad is not None]
        self.gradients[-1] = sum(param.grad.norm().item() for param in params)


class LastLayerOnly(Chart):
    def note_step(self, optimizer, args, kwargs):
        super().note_step(optimizer, args, kwargs)
        self.weights[-1] = list(self.model.parameters())[-1].detach().abs().sum().item()


class OneForEachParameter(Chart):
    def note_step(self, optimizer, args, kwargs):
        for param in self.model.parameters():
            self.weights.append(param.detach().sum().item())
        self.gradients.append(0.0)


class Tensors(Chart):
    def note_inputs(self, model, inputs):
        self.inputs.append(inputs[0])


class ByLabcode(l07_clinic.Chart):
    pass


class Swallows(Chart):
    def __exit__(self, *error):
        super().__exit__()
        return True


class Clips(Chart):
    def note_step(self, optimizer, args, kwargs):
        super().note_step(optimizer, args, kwargs)
        self.gradients[-1] = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0).item()


class ReturnsZeros(Chart):
    def note_inputs(self, model, inputs):
        super().note_inputs(model, inputs)
        return inputs[0] * 0


class ReturnsTheNumber(Chart):
    def note_inputs(self, model, inputs):
        super().note_inputs(model, inputs)
        return torch.tensor(float(self.inputs[-1])).expand_as(inputs[0])


class TooEarly(Chart):
    def __init__(self, model, optimizer, loader=None):
        super().__init__(model, optimizer)
        super().__enter__()

    def __enter__(self):
        return self


class SquaresInPlace(Chart):
    def note_step(self, optimizer, args, kwargs):
        super().note_step(optimizer, args, kwargs)
        total = 0.0
        for param in self.model.parameters():
            if param.grad is not None:
                total += param.grad.square_().sum().item()
        self.gradients[-1] = total**0.5


class SeedsTheGenerator(Chart):
    def note_inputs(self, model, inputs):
        torch.manual_seed(0)
        flat = inputs[0].flatten().double()
        self.inputs.append((flat * torch.rand(len(flat))).sum().item())


class WithItsRank(Chart):
    def note_inputs(self, model, inputs):
        super().note_inputs(model, inputs)
        self.inputs[-1] += dist.get_rank()


class ByHashOfText(Chart):
    """Python draws what it hashes texts with anew in each process."""

    def note_inputs(self, model, inputs):
        self.inputs.append(hash(str(inputs[0].tolist())))


class EvalMode(Chart):
    def note_inputs(self, model, inputs):
        model.eval()
        super().note_inputs(model, inputs)


CHART = Answers(
    check=l07.chart,
    right={"checksums": Chart, "by position": ByPosition, "tuples": ByTuples},
    wrong={
        "plain sum": (PlainSum, "in another order got the same number"),
        "sum of rows": (SumOfRows, "the features of its samples in another order"),
        "by identity": (ByIdentity, "forward passes 0 and 3"),
        "after the step": (AfterTheStep, "when did you look?"),
        "hooks stay": (NeverRemoved, "who removes the hooks?"),
        "enter without return": (WithoutReturn, "return self"),
        "nothing registered": (NothingRegistered, "is the hook registered?"),
        "a frozen parameter": (FrozenForgotten, "NoneType"),
        "no root": (RootForgotten, "that is its square"),
        "sum of norms": (SumOfNorms, "one root over the squares"),
        "the last layer": (LastLayerOnly, "one weight of parameter 0"),
        "a number for each parameter": (OneForEachParameter, "one for each optimizer step"),
        "tensors": (Tensors, "plain numbers can be sent"),
        "labcode's": (ByLabcode, "labcode's own"),
        "swallows errors": (Swallows, "what does __exit__ return?"),
        "clips": (Clips, "which call in note_step writes into gradients"),
        "returns zeros": (ReturnsZeros, "what does note_inputs return"),
        "returns the number": (ReturnsTheNumber, "what does note_inputs return"),
        "hooks from the start": (TooEarly, "before the block has begun"),
        "squares in place": (SquaresInPlace, "which call in note_step writes into gradients"),
        "seeds the generator": (SeedsTheGenerator, "note_inputs draws random numbers"),
        "with its rank": (WithItsRank, "all ranks were given the same inputs"),
        "by the hash of a text": (ByHashOfText, "all ranks were given the same inputs"),
        "in eval mode": (EvalMode, "eval mode"),
    },
)

# ---- the scripts of the lesson, as the solution has them and as the student gets them

LESSON = Path(__file__).parents[2] / "solutions" / "07_the_ddp_clinic.py"
SOLVED, GIVEN = notebooks_of(LESSON.read_text(), LESSON.name)


@functools.cache
def _pair():
    pair = Ranks(2)
    atexit.register(pair.close)
    return pair


def _source(notebook, name):
    """The cell that defines a function."""
    (cell,) = [cell for cell in notebook.cells if f"def {name}(" in cell.source]
    return cell.source


def _imports():
    cells = [cell.source for cell in SOLVED.cells if "\nimport torch\n" in cell.source]
    lines = [line for line in cells[0].splitlines() if not line.startswith(("ranks", "pair"))]
    return "\n".join(lines)


def _made(source, name):
    namespace = {"__name__": "a_notebook"}
    exec(compile(f"{_imports()}\n{source}", "a notebook", "exec"), namespace)
    return namespace[name]


def cured(name, *changes):
    """A script as the solution has it, with some text in it replaced."""
    source = _source(SOLVED, name)
    for old, new in changes:
        assert source.count(old) == 1, f"{source.count(old)} times in {name}: {old}"
        source = source.replace(old, new)
    return _made(source, name)


def ill(name, *changes):
    """A script as the student gets it, without its first line."""
    lines = _source(GIVEN, name).splitlines()
    source = "\n".join(line for line in lines if "NotImplementedError" not in line)
    for old, new in changes:
        assert source.count(old) == 1, f"{source.count(old)} times in {name}: {old}"
        source = source.replace(old, new)
    return _made(source, name)


def check_cures(answers, ranks):
    l07.cured(_pair(), *answers)


# ---- 7.3 data

BY_THE_GROUP = "num_replicas=dist.get_world_size(), rank=dist.get_rank(), shuffle=False"
DATA = Answers(
    check=check_cures,
    right={
        "a sampler, and set_epoch": (cured("patient_1"), cured("patient_2")),
        "with all arguments": (
            cured("patient_1", ("data, shuffle=False", f"data, {BY_THE_GROUP}")),
            cured("patient_2", ("sampler.set_epoch", "loader.sampler.set_epoch")),
        ),
        "every second sample": (
            cured(
                "patient_1",
                (
                    "DistributedSampler(data, shuffle=False)",
                    "range(dist.get_rank(), len(data), dist.get_world_size())",
                ),
            ),
            cured("patient_2", ("set_epoch(epoch)", "set_epoch(epoch=epoch)")),
        ),
        "epochs from 1": (
            cured("patient_1"),
            cured("patient_2", ("set_epoch(epoch)", "set_epoch(epoch + 1)")),
        ),
        "every second epoch number": (
            cured("patient_1"),
            cured("patient_2", ("set_epoch(epoch)", "set_epoch(2 * epoch)")),
        ),
    },
    wrong={
        "as it came": ((ill("patient_1"), cured("patient_2")), "the doctor says, same data"),
        "the second as it came": (
            (cured("patient_1"), ill("patient_2")),
            "patient 2: the doctor says, set_epoch forgotten",
        ),
        "shuffled without a share": (
            (
                ill("patient_1", ("batch_size=32", "batch_size=32, shuffle=True")),
                cured("patient_2"),
            ),
            "patient 1",
        ),
        "the sampler is not used": (
            (cured("patient_1", (", sampler=sampler", "")), cured("patient_2")),
            "same data",
        ),
        "half the batch instead": (
            (ill("patient_1", ("batch_size=32", "batch_size=16")), cured("patient_2")),
            "same data",
        ),
        "set_epoch(0)": (
            (cured("patient_1"), cured("patient_2", ("set_epoch(epoch)", "set_epoch(0)"))),
            "set_epoch forgotten",
        ),
        "another name": (
            (cured("patient_1"), lambda watch: None),
            "keep its name",
        ),
        "nobody watches": (
            (
                cured("patient_1", ("with watch(model, optimizer, loader=loader):", "if True:")),
                cured("patient_2"),
            ),
            "keep `with watch(...)`",
        ),
        "no return": (
            (cured("patient_1", ("    return num_batches", "")), cured("patient_2")),
            "it returned None",
        ),
        "one batch a rank": (
            (
                cured("patient_1", ("num_batches += 1", "num_batches += 1; break")),
                cured("patient_2"),
            ),
            "optimizer steps",
        ),
        "shuffled too": (
            (cured("patient_1", ("data, shuffle=False", "data")), cured("patient_2")),
            "patient 1, rank 0: forward pass 0 got other samples",
        ),
        "halves": (
            (
                cured(
                    "patient_1",
                    (
                        "DistributedSampler(data, shuffle=False)",
                        "range(256 * dist.get_rank(), 256 * dist.get_rank() + 256)",
                    ),
                ),
                cured("patient_2"),
            ),
            "which samples belong to this rank?",
        ),
        "another epoch on each rank": (
            (
                cured("patient_1"),
                cured("patient_2", ("set_epoch(epoch)", "set_epoch(epoch + dist.get_rank())")),
            ),
            "the ranks then share out different orders",
        ),
        "another seed on each rank": (
            (
                cured("patient_1"),
                cured("patient_2", ("(data)", "(data, seed=dist.get_rank())")),
            ),
            "patient 2, rank 1: forward pass 0 got other samples",
        ),
        "set after the batches": (
            (
                cured("patient_1"),
                ill(
                    "patient_2",
                    (
                        "            orders.append(torch.cat(seen))\n",
                        "            orders.append(torch.cat(seen))\n"
                        "            sampler.set_epoch(epoch)\n",
                    ),
                ),
            ),
            "set_epoch forgotten",
        ),
    },
)

# ---- 7.4 weights

HEAD_ATTRIBUTE = ("    body[4] = head\n", "    body = torch.nn.Sequential(*body[:4], head)\n")
XAVIER = "    torch.nn.init.xavier_normal_(model.module[2].weight)\n"
NEW_HEAD = "    model.module[4] = head\n"
WEIGHTS = Answers(
    check=check_cures,
    right={
        "before wrapping": (cured("patient_5"), cured("patient_6")),
        "a new body": (cured("patient_5"), cured("patient_6", HEAD_ATTRIBUTE)),
        "sent after the change": (
            ill(
                "patient_5",
                (XAVIER, f"{XAVIER}    dist.broadcast(model.module[2].weight.data, 0)\n"),
            ),
            cured("patient_6"),
        ),
        "wrapped again": (
            ill("patient_5", (XAVIER, f"{XAVIER}    model = DDP(model.module)\n")),
            ill("patient_6", (NEW_HEAD, f"{NEW_HEAD}    model = DDP(model.module)\n")),
        ),
        "wrapped at the end": (
            cured("patient_5", ("layers[2].weight)", "layers[2].weight, gain=1.0)")),
            cured("patient_6", ("    model = DDP(body)", "    model = DDP(module=body)")),
        ),
    },
    wrong={
        "as it came": ((ill("patient_5"), cured("patient_6")), "different weights"),
        "6 as it came": ((cured("patient_5"), ill("patient_6")), "changed after wrapping"),
        "as the error advises": (
            (
                cured("patient_5"),
                ill("patient_6", ("DDP(body)", "DDP(body, find_unused_parameters=True)")),
            ),
            "changed after wrapping",
        ),
        "no Xavier": (
            (
                cured("patient_5", ("    torch.nn.init.xavier_normal_(layers[2].weight)\n", "")),
                cured("patient_6"),
            ),
            "not those of the healthy run",
        ),
        "no new head": (
            (cured("patient_5"), cured("patient_6", ("    body[4] = head\n", ""))),
            "not those of the healthy run",
        ),
        "weights sent by hand at the end": (
            (
                ill(
                    "patient_5",
                    (
                        "    return apart",
                        "    dist.broadcast(model.module[2].weight.data, 0)\n    return apart",
                    ),
                ),
                cured("patient_6"),
            ),
            "different weights",
        ),
        "one seed for all": (
            (
                ill("patient_5", ("manual_seed(dist.get_rank())", "manual_seed(0)")),
                cured("patient_6"),
            ),
            "with one seed for all the fault is still there",
        ),
        "one seed, just before": (
            (
                ill("patient_5", (XAVIER, f"    torch.manual_seed(0)\n{XAVIER}")),
                cured("patient_6"),
            ),
            "with one seed for all the fault is still there",
        ),
        "a DDP in a DDP": (
            (ill("patient_5", (XAVIER, f"{XAVIER}    model = DDP(model)\n")), cured("patient_6")),
            "a DDP inside the DDP",
        ),
        "the old head is trained": (
            (
                cured("patient_5"),
                cured(
                    "patient_6",
                    (
                        "    body[4] = head\n",
                        "    old = list(body.parameters())\n    body[4] = head\n",
                    ),
                    ("SGD(model.parameters()", "SGD(old"),
                ),
            ),
            "not those of the healthy run",
        ),
        "only the body is wrapped": (
            (
                cured("patient_5"),
                cured(
                    "patient_6",
                    (
                        "    model = DDP(body)\n",
                        "    model = torch.nn.Sequential(DDP(body[:4]), head)\n",
                    ),
                ),
            ),
            "weights drift",
        ),
        "Xavier in another layer": (
            (cured("patient_5", ("layers[2]", "layers[4]")), cured("patient_6")),
            "not those of the healthy run",
        ),
    },
)

# ---- 7.6 gradients

ALL_FOUR = """            for inputs, targets in batches[first : first + 4]:
                loss = cross_entropy(model(inputs), targets) / 4
                loss.backward()
"""
AS_ONE_BATCH = """            inputs = torch.cat([one for one, _ in batches[first : first + 4]])
            targets = torch.cat([one for _, one in batches[first : first + 4]])
            cross_entropy(model(inputs), targets).backward()
"""
GRADIENTS = Answers(
    check=check_cures,
    right={
        "the lesson's": (cured("patient_3"), cured("patient_4"), cured("patient_8")),
        "with contexts": (
            cured("patient_3", ("loss = loss / 4", "loss = 0.25 * loss")),
            ill(
                "patient_4",
                (
                    ALL_FOUR,
                    """            for place in range(first, first + 4):
                inputs, targets = batches[place]
                model.require_backward_grad_sync = place == first + 3
                (cross_entropy(model(inputs), targets) / 4).backward()
""",
                ),
            ),
            ill(
                "patient_8",
                (
                    "cross_entropy(model(inputs), targets)",
                    "cross_entropy(model(inputs), targets) * count * 2 / 64",
                ),
            ),
        ),
        "sums": (
            cured(
                "patient_3",
                (
                    "loss = cross_entropy(model(inputs), targets)",
                    "loss = cross_entropy(model(inputs), targets, reduction='sum') / 32",
                ),
            ),
            cured("patient_4"),
            cured("patient_8", ("dist.get_world_size() / 64", "2 / 64")),
        ),
        "one large batch": (
            cured(
                "patient_3",
                ("                loss = loss / 4\n", ""),
                ("loss.back", "(loss / 4).back"),
            ),
            ill("patient_4", (ALL_FOUR, AS_ONE_BATCH)),
            cured("patient_8"),
        ),
    },
    wrong={
        "3 as it came": (
            (ill("patient_3"), cured("patient_4"), cured("patient_8")),
            "1/m missing",
        ),
        "4 as it came": (
            (cured("patient_3"), ill("patient_4"), cured("patient_8")),
            "no_sync missing",
        ),
        "8 as it came": (
            (cured("patient_3"), cured("patient_4"), ill("patient_8")),
            "mean of means",
        ),
        "a smaller rate": (
            (ill("patient_3", ("lr=0.1", "lr=0.025")), cured("patient_4"), cured("patient_8")),
            "1/m missing",
        ),
        "divided by 2": (
            (
                cured("patient_3", ("loss / 4", "loss / 2")),
                cured("patient_4"),
                cured("patient_8"),
            ),
            "patient 3, rank 0: it returned",
        ),
        "ranks forgotten": (
            (
                cured("patient_3"),
                cured("patient_4"),
                cured("patient_8", (" * dist.get_world_size()", "")),
            ),
            "patient 8, rank 0: it returned",
        ),
        "never sent": (
            (
                cured("patient_3"),
                ill(
                    "patient_4",
                    (
                        ALL_FOUR,
                        """            with model.no_sync():
                for inputs, targets in batches[first : first + 4]:
                    (cross_entropy(model(inputs), targets) / 4).backward()
""",
                    ),
                ),
                cured("patient_8"),
            ),
            "patient 4",
        ),
        "only forward within": (
            (
                cured("patient_3"),
                ill(
                    "patient_4",
                    (
                        "                loss.backward()\n",
                        "                with model.no_sync():\n"
                        "                    loss.backward()\n",
                    ),
                ),
                cured("patient_8"),
            ),
            "patient 4",
        ),
        "32 and 32": (
            (
                cured("patient_3"),
                cured("patient_4"),
                ill(
                    "patient_8",
                    ("48 if dist.get_rank() == 0 else 16", "32"),
                    ("else 48", "else 32"),
                ),
            ),
            "patient 8, rank 0: forward pass 0 got other samples",
        ),
        "all on rank 0": (
            (
                cured("patient_3"),
                cured("patient_4"),
                cured(
                    "patient_8",
                    ("48 if dist.get_rank() == 0 else 16", "64 if dist.get_rank() == 0 else 0"),
                    ("else 48", "else 64"),
                ),
            ),
            "patient 8",
        ),
        "by the own count": (
            (
                cured("patient_3"),
                cured("patient_4"),
                cured("patient_8", ("dist.get_world_size() / 64", "1 / count")),
            ),
            "patient 8, rank 0: it returned",
        ),
        "3 never sent": (
            (
                cured("patient_3", ("number == first + 3", "False")),
                cured("patient_4"),
                cured("patient_8"),
            ),
            "weights drift",
        ),
    },
)

# ---- 7.7 the roll call


def waiting_in_turn(store, name, rank, num_ranks, limit_s):
    store.set(f"{name}/{rank}", "here")
    deadline = time.monotonic() + limit_s
    missing = []
    for other in range(num_ranks):
        note = f"{name}/{other}"
        left_s = deadline - time.monotonic()
        if left_s > 0:
            with contextlib.suppress(RuntimeError):
                store.wait([note], timedelta(seconds=left_s))
        if not store.check([note]):
            missing.append(other)
    return missing


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


def without_a_note(store, name, rank, num_ranks, limit_s):
    notes = [f"{name}/{other}" for other in range(num_ranks)]
    try:
        store.wait(notes, timedelta(seconds=limit_s))
    except RuntimeError:
        return [other for other, note in enumerate(notes) if not store.check([note])]
    return []


def each_its_own_limit(store, name, rank, num_ranks, limit_s):
    store.set(f"{name}/{rank}", "here")
    missing = []
    for other in range(num_ranks):
        try:
            store.wait([f"{name}/{other}"], timedelta(seconds=limit_s))
        except RuntimeError:
            missing.append(other)
    return missing


def looking_once(store, name, rank, num_ranks, limit_s):
    store.set(f"{name}/{rank}", "here")
    return [other for other in range(num_ranks) if not store.check([f"{name}/{other}"])]


def errors_pass(store, name, rank, num_ranks, limit_s):
    store.set(f"{name}/{rank}", "here")
    notes = [f"{name}/{other}" for other in range(num_ranks)]
    store.wait(notes, timedelta(seconds=limit_s))
    return []


def those_who_came(store, name, rank, num_ranks, limit_s):
    missing = waiting_for_all(store, name, rank, num_ranks, limit_s)
    return [other for other in range(num_ranks) if other not in missing]


def one_note_for_all(store, name, rank, num_ranks, limit_s):
    store.set(name, "here")
    missing = []
    for other in range(num_ranks):
        if not store.check([name]):
            missing.append(other)
    return missing


def only_how_many(store, name, rank, num_ranks, limit_s):
    return len(waiting_for_all(store, name, rank, num_ranks, limit_s))


def a_barrier(store, name, rank, num_ranks, limit_s):
    dist.barrier()
    return []


def name_ignored(store, name, rank, num_ranks, limit_s):
    return waiting_for_all(store, "here", rank, num_ranks, limit_s)


def sleeps(store, name, rank, num_ranks, limit_s):
    store.set(f"{name}/{rank}", "here")
    time.sleep(limit_s)
    return [other for other in range(num_ranks) if not store.check([f"{name}/{other}"])]


def below_zero(store, name, rank, num_ranks, limit_s):
    store.set(f"{name}/{rank}", "here")
    deadline = time.monotonic() + limit_s
    missing = []
    for other in range(num_ranks):
        try:
            store.wait([f"{name}/{other}"], timedelta(seconds=deadline - time.monotonic()))
        except RuntimeError:
            missing.append(other)
            time.sleep(0.05)  # less than a millisecond past the deadline would count as zero
    return missing


def in_milliseconds(store, name, rank, num_ranks, limit_s):
    return waiting_for_all(store, name, rank, num_ranks, limit_s / 1000)


def all_but_me(store, name, rank, num_ranks, limit_s):
    if waiting_for_all(store, name, rank, num_ranks, limit_s):
        return [other for other in range(num_ranks) if other != rank]
    return []


def from_rank_1(store, name, rank, num_ranks, limit_s):
    return [other for other in waiting_for_all(store, name, rank, num_ranks, limit_s) if other]


def by_a_count(store, name, rank, num_ranks, limit_s):
    store.add(name, 1)
    end = time.monotonic() + limit_s
    while time.monotonic() < end and store.add(name, 0) < num_ranks:
        time.sleep(0.01)
    return list(range(store.add(name, 0), num_ranks))


ROLL_CALL = Answers(
    check=l07.roll_call,
    right={
        "one after the other": waiting_in_turn,
        "all at once": waiting_for_all,
        "looking again": looking_again,
    },
    wrong={
        "without a note": (without_a_note, "as the absent ones, expected []"),
        "a limit for each": (each_its_own_limit, "the limit is for all of them together"),
        "looking once": (looking_once, "as the absent ones, expected []"),
        "the error passes": (errors_pass, "it waited for something that no rank put"),
        "those who came": (those_who_came, "as the absent ones, expected []"),
        "one note for all": (one_note_for_all, "rank 2 does not come"),
        "only how many": (only_how_many, "a list of ranks is wanted"),
        "the name ignored": (name_ignored, "was at an earlier point"),
        "in milliseconds": (in_milliseconds, "rank 2 comes late, but in time"),
        "all but me": (all_but_me, "as the absent ones, expected [2]"),
        "from rank 1 on": (from_rank_1, "where rank 0 does not come"),
        "by a count": (by_a_count, "as the absent ones, expected [2]"),
        "sleeps": (sleeps, "though nobody is absent"),
        "below zero": (below_zero, "time-out is zero or less never ends"),
    },
)

# ---- 7.8 trainings that stand still

FIRST_MEAN = """            mean = loss.detach().clone()
            dist.all_reduce(mean)
"""
WAITING = Answers(
    check=check_cures,
    right={
        "the lesson's": (cured("patient_11"), cured("patient_14"), cured("patient_15")),
        "in other words": (
            cured("patient_11", ("all_reduce(mean)", "all_reduce(mean, op=dist.ReduceOp.SUM)")),
            cured("patient_14", ("TwoWays(),", "module=TwoWays(),")),
            cured("patient_15", ("    end = len(data)\n", "    end = 512\n")),
        ),
        "by a sampler": (
            cured("patient_11", (FIRST_MEAN, FIRST_MEAN.replace("loss.detach()", "loss.data"))),
            cured(
                "patient_14", ("self.one(inputs)\n", "self.one(inputs) + 0 * self.other(inputs)\n")
            ),
            cured(
                "patient_15",
                (
                    "range(dist.get_rank(), end, 2)",
                    "DistributedSampler(data, shuffle=False)",
                ),
            ),
        ),
    },
    wrong={
        "11 as it came": (
            (ill("patient_11"), cured("patient_14"), cured("patient_15")),
            "skipped call",
        ),
        "14 as it came": (
            (cured("patient_11"), ill("patient_14"), cured("patient_15")),
            "unused parameters",
        ),
        "15 as it came": (
            (cured("patient_11"), cured("patient_14"), ill("patient_15")),
            "skipped call",
        ),
        "the loss of rank 0": (
            (
                ill("patient_11", ("                dist.all_reduce(mean)\n", "")),
                cured("patient_14"),
                cured("patient_15"),
            ),
            "patient 11, rank 0: it returned",
        ),
        "all stop early": (
            (
                cured("patient_11"),
                cured("patient_14"),
                ill("patient_15", (" - 128 * dist.get_rank()", " - 128")),
            ),
            "optimizer steps",
        ),
        "one way only": (
            (
                cured("patient_11"),
                ill("patient_14", ("self.step % 2 == 1", "True")),
                cured("patient_15"),
            ),
            "unused parameters",
        ),
        "a static graph": (
            (
                cured("patient_11"),
                ill("patient_14", ("DDP(TwoWays())", "DDP(TwoWays(), static_graph=True)")),
                cured("patient_15"),
            ),
            "patient 14",
        ),
        "rank 1 gives nothing": (
            (
                cured("patient_11", (".clone()", " * (1 - dist.get_rank())")),
                cured("patient_14"),
                cured("patient_15"),
            ),
            "patient 11, rank 0: it returned",
        ),
        "sent, not added": (
            (
                cured("patient_11", ("all_reduce(mean)", "broadcast(mean, 0)")),
                cured("patient_14"),
                cured("patient_15"),
            ),
            "patient 11, rank 0: it returned",
        ),
        "to rank 0 only": (
            (
                cured("patient_11", ("all_reduce(mean)", "reduce(mean, 0)")),
                cured("patient_14"),
                cured("patient_15"),
            ),
            "patient 11, rank 1: it returned",
        ),
        "a barrier elsewhere": (
            (
                ill(
                    "patient_11",
                    (
                        "                dist.all_reduce(mean)\n",
                        "                dist.all_reduce(mean)\n"
                        "            else:\n                dist.barrier()\n",
                    ),
                ),
                cured("patient_14"),
                cured("patient_15"),
            ),
            "calls do not match",
        ),
        "shuffled": (
            (
                cured("patient_11"),
                cured("patient_14"),
                cured("patient_15", ("range(dist.get_rank(), end, 2)", "DistributedSampler(data)")),
            ),
            "patient 15, rank 0: forward pass 0 got other samples",
        ),
        "the same samples on both": (
            (
                cured("patient_11"),
                cured("patient_14"),
                cured("patient_15", ("range(dist.get_rank(), end, 2)", "range(0, end, 2)")),
            ),
            "same data",
        ),
        "six batches for all": (
            (
                cured("patient_11"),
                cured("patient_14"),
                ill(
                    "patient_15",
                    (
                        "        for inputs, targets in loader:\n",
                        "        for inputs, targets in list(loader)[:6]:\n",
                    ),
                ),
            ),
            "optimizer steps",
        ),
    },
)

# ---- 7.9 fair shares


def one_by_one(sample_s, global_batch):
    counts = [0] * len(sample_s)
    for _ in range(global_batch):
        ready = [(count + 1) * s for count, s in zip(counts, sample_s)]
        counts[ready.index(min(ready))] += 1
    return counts


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


def the_fastest_alone(sample_s, global_batch):
    counts = [0] * len(sample_s)
    counts[sample_s.index(min(sample_s))] = global_batch
    return counts


def ready_now(sample_s, global_batch):
    counts = [0] * len(sample_s)
    for _ in range(global_batch):
        ready = [count * s for count, s in zip(counts, sample_s)]
        counts[ready.index(min(ready))] += 1
    return counts


def for_two_ranks(sample_s, global_batch):
    first = round(global_batch * sample_s[-1] / (sample_s[0] + sample_s[-1]))
    return [first, global_batch - first]


def fastest_first(sample_s, global_batch):
    return sorted(one_by_one(sample_s, global_batch), reverse=True)


def one_for_each(sample_s, global_batch):
    rest = one_by_one(sample_s, max(0, global_batch - len(sample_s)))
    return [count + 1 for count in rest]


def floats_that_are_whole(sample_s, global_batch):
    return [float(count) for count in one_by_one(sample_s, global_batch)]


def sorts_its_argument(sample_s, global_batch):
    sample_s.sort()
    return one_by_one(sample_s, global_batch)


SHARES = Answers(
    check=lambda answer, ranks: l07.shares(answer),
    right={
        "one by one": one_by_one,
        "with a heap": with_a_heap,
        "by speed, then one by one": by_speed_then_one_by_one,
    },
    wrong={
        "all alike": (all_alike, "is possible"),
        "by seconds": (by_seconds, "is possible"),
        "rounded": (rounded, "shares("),
        "the rest to the first": (the_rest_to_the_first, "is possible"),
        "fractions": (fractions, "samples are whole"),
        "the fastest alone": (the_fastest_alone, "is possible"),
        "ready now": (ready_now, "is possible"),
        "sorts its argument": (sorts_its_argument, "has changed the list"),
        "for two ranks": (for_two_ranks, "one number for each of the 3 ranks"),
        "fastest first": (fastest_first, "is possible"),
        "one for each": (one_for_each, "shares("),
        "whole floats": (floats_that_are_whole, "of type int"),
    },
)

# ---- 7.10 the night shift


def check_night(answer, ranks):
    l07.night(_pair(), answer)


SET_EPOCH = ("            sampler.set_epoch(epoch)\n", "")
FOURTH = ("cross_entropy(model(inputs), targets) / 4", "cross_entropy(model(inputs), targets)")
SENT_ONCE = ("                model.require_backward_grad_sync = is_last\n", "")
RANK_0 = (
    "            if dist.get_rank() == 0:\n                torch.save",
    "            torch.save",
)
SAVED = (
    "            if dist.get_rank() == 0:\n"
    '                torch.save(model.module.state_dict(), "runs/night.pt")\n',
    "",
)
NIGHT = Answers(
    check=check_night,
    right={
        "the lesson's": cured("night_shift"),
        "an average at the end": cured(
            "night_shift",
            FOURTH,
            ("loss.backward()", "(loss * 0.25).backward()"),
        ),
        "saved after a barrier": cured(
            "night_shift",
            ('"runs/night.pt")', '"runs/night.pt")\n            dist.barrier()'),
        ),
        "epochs from 1": cured("night_shift", ("set_epoch(epoch)", "set_epoch(epoch + 1)")),
    },
    wrong={
        "as it came": (ill("night_shift"), "0 of 5 faults are gone"),
        "set_epoch forgotten": (cured("night_shift", SET_EPOCH), "4 of 5 faults are gone"),
        "not divided": (cured("night_shift", FOURTH), "1/m missing"),
        "sent at each backward": (cured("night_shift", SENT_ONCE), "no_sync missing"),
        "saved by all": (cured("night_shift", RANK_0), "saved by all"),
        "only two": (cured("night_shift", RANK_0, FOURTH), "3 of 5 faults are gone"),
        "divided by 3": (cured("night_shift", ("/ 4", "/ 3")), "the patient of the night"),
        "still searching": (
            cured("night_shift", ("small_model())", "small_model(), find_unused_parameters=True)")),
            "search unneeded",
        ),
        "never saved": (cured("night_shift", SAVED), "no rank saves a checkpoint any more"),
        "never sent": (cured("night_shift", ("sync = is_last", "sync = False")), "weights drift"),
        "every epoch as one": (
            cured("night_shift", ("set_epoch(epoch)", "set_epoch(dist.get_rank())")),
            "set_epoch forgotten",
        ),
        "another epoch on each rank": (
            cured("night_shift", ("set_epoch(epoch)", "set_epoch(epoch + dist.get_rank())")),
            "the ranks then share out different orders",
        ),
        "a smaller rate": (
            cured("night_shift", FOURTH, ("lr=0.1", "lr=0.025")),
            "1/m missing",
        ),
        "gradients kept": (
            cured("night_shift", ("                    optimizer.zero_grad()\n", "")),
            "the patient of the night",
        ),
    },
)

# ---- 7.5 BatchNorm over the samples of all ranks

DIMS = (0, 2)
Function = torch.autograd.Function


class SumsAndSquares(Function):
    """One all-reduce of count, sums and squares."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps, group):
        count = x.new_tensor([x.shape[0] * x.shape[2]])
        row = torch.cat([count, x.sum(DIMS), (x * x).sum(DIMS)])
        dist.all_reduce(row, group=group)
        total = row[0]
        mean, square = row[1:].view(2, -1) / total
        inverse = 1 / torch.sqrt(square - mean**2 + eps)
        x_hat = (x - mean[:, None]) * inverse[:, None]
        ctx.save_for_backward(x_hat, weight, inverse, total)
        ctx.group = group
        return weight[:, None] * x_hat + bias[:, None]

    @staticmethod
    def backward(ctx, grad):
        x_hat, weight, inverse, total = ctx.saved_tensors
        grad_bias = grad.sum(DIMS)
        grad_weight = (grad * x_hat).sum(DIMS)
        sums = torch.stack([grad_bias, grad_weight])
        dist.all_reduce(sums, group=ctx.group)
        sums = sums / total
        inner = grad - sums[0][:, None] - x_hat * sums[1][:, None]
        return (weight * inverse)[:, None] * inner, grad_weight, grad_bias, None, None


class WithoutBias(SumsAndSquares):
    @staticmethod
    def forward(ctx, x, weight, bias, eps, group):
        y = SumsAndSquares.forward(ctx, x, weight, bias, eps, group)
        return y - bias[:, None]


class NegativeVariance(SumsAndSquares):
    @staticmethod
    def forward(ctx, x, weight, bias, eps, group):
        y = SumsAndSquares.forward(ctx, x, weight, bias, eps, group)
        return y / torch.sqrt(y.mean() - y.square().mean() - 1)


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


class OwnStatistics(Function):
    """Something travels, but not what is used."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps, group):
        dist.all_reduce(torch.ones(1, dtype=x.dtype), group=group)
        var, mean = torch.var_mean(x, DIMS, correction=0)
        inverse = (var + eps).rsqrt()
        x_hat = (x - mean[:, None]) * inverse[:, None]
        total = x.new_tensor(x.shape[0] * x.shape[2])
        ctx.save_for_backward(x_hat, weight, inverse, total)
        ctx.group = group
        return weight[:, None] * x_hat + bias[:, None]

    backward = SumsAndSquares.backward


class NothingTravels(Function):
    """A plain BatchNorm, backward included."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps, group):
        var, mean = torch.var_mean(x, DIMS, correction=0)
        inverse = (var + eps).rsqrt()
        x_hat = (x - mean[:, None]) * inverse[:, None]
        ctx.save_for_backward(x_hat, weight, inverse, None)
        return weight[:, None] * x_hat + bias[:, None]

    @staticmethod
    def backward(ctx, grad):
        return OwnSums.backward(ctx, grad)


class AveragesStatistics(Function):
    """The mean over ranks of the ranks' means and variances."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps, group):
        var, mean = torch.var_mean(x, DIMS, correction=0)
        both = torch.stack([mean, var])
        dist.all_reduce(both, group=group)
        mean, var = both / group.size()
        inverse = (var + eps).rsqrt()
        x_hat = (x - mean[:, None]) * inverse[:, None]
        total = x.new_tensor(group.size() * x.shape[0] * x.shape[2])
        ctx.save_for_backward(x_hat, weight, inverse, total)
        ctx.group = group
        return weight[:, None] * x_hat + bias[:, None]

    backward = SumsAndSquares.backward


class EveryRankCountsAlike(Function):
    """Averages of means and of squares: right with equal shares."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps, group):
        both = torch.stack([x.mean(DIMS), (x * x).mean(DIMS)]) / group.size()
        dist.all_reduce(both, group=group)
        mean, square = both
        inverse = (square - mean**2 + eps).rsqrt()
        x_hat = (x - mean[:, None]) * inverse[:, None]
        total = x.new_tensor(group.size() * x.shape[0] * x.shape[2])
        ctx.save_for_backward(x_hat, weight, inverse, total)
        ctx.group = group
        return weight[:, None] * x_hat + bias[:, None]

    backward = SumsAndSquares.backward


class Unbiased(Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps, group):
        count = x.new_tensor([x.shape[0] * x.shape[2]])
        row = torch.cat([count, x.sum(DIMS), (x * x).sum(DIMS)])
        dist.all_reduce(row, group=group)
        total = row[0]
        mean, square = row[1:].view(2, -1) / total
        var = (square - mean**2) * total / (total - 1)
        inverse = (var + eps).rsqrt()
        x_hat = (x - mean[:, None]) * inverse[:, None]
        ctx.save_for_backward(x_hat, weight, inverse, total)
        ctx.group = group
        return weight[:, None] * x_hat + bias[:, None]

    backward = SumsAndSquares.backward


class EpsOutside(Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps, group):
        count = x.new_tensor([x.shape[0] * x.shape[2]])
        row = torch.cat([count, x.sum(DIMS), (x * x).sum(DIMS)])
        dist.all_reduce(row, group=group)
        total = row[0]
        mean, square = row[1:].view(2, -1) / total
        inverse = 1 / ((square - mean**2).sqrt() + eps)
        x_hat = (x - mean[:, None]) * inverse[:, None]
        ctx.save_for_backward(x_hat, weight, inverse, total)
        ctx.group = group
        return weight[:, None] * x_hat + bias[:, None]

    backward = SumsAndSquares.backward


class GathersTheBatch(Function):
    """All samples to all ranks, padded to one size."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps, group):
        padded = x.new_zeros(5, *x.shape[1:])
        padded[: len(x)] = x
        parts = [torch.empty_like(padded) for _ in range(group.size())]
        dist.all_gather(parts, padded, group=group)
        seen = torch.cat([part[part.abs().sum((1, 2)) > 0] for part in parts])
        var, mean = torch.var_mean(seen, DIMS, correction=0)
        inverse = (var + eps).rsqrt()
        x_hat = (x - mean[:, None]) * inverse[:, None]
        total = x.new_tensor(seen.shape[0] * seen.shape[2])
        ctx.save_for_backward(x_hat, weight, inverse, total)
        ctx.group = group
        return weight[:, None] * x_hat + bias[:, None]

    backward = SumsAndSquares.backward


class NormInTheWorld(Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps, group):
        return SumsAndSquares.forward(ctx, x, weight, bias, eps, dist.group.WORLD)

    backward = SumsAndSquares.backward


class ConstantStatistics(Function):
    forward = SumsAndSquares.forward

    @staticmethod
    def backward(ctx, grad):
        x_hat, weight, inverse, _ = ctx.saved_tensors
        grad_x = grad * (weight * inverse)[:, None]
        return grad_x, (grad * x_hat).sum(DIMS), grad.sum(DIMS), None, None


class OwnSums(Function):
    forward = SumsAndSquares.forward

    @staticmethod
    def backward(ctx, grad):
        x_hat, weight, inverse, _ = ctx.saved_tensors
        grad_bias, grad_weight = grad.sum(DIMS), (grad * x_hat).sum(DIMS)
        values = grad.shape[0] * grad.shape[2]
        inner = grad - (grad_bias[:, None] + x_hat * grad_weight[:, None]) / values
        return (weight * inverse)[:, None] * inner, grad_weight, grad_bias, None, None


class OwnCount(Function):
    forward = SumsAndSquares.forward

    @staticmethod
    def backward(ctx, grad):
        x_hat, weight, inverse, _ = ctx.saved_tensors
        grad_bias, grad_weight = grad.sum(DIMS), (grad * x_hat).sum(DIMS)
        sums = torch.stack([grad_bias, grad_weight])
        dist.all_reduce(sums, group=ctx.group)
        sums /= grad.shape[0] * grad.shape[2]
        inner = grad - sums[0][:, None] - x_hat * sums[1][:, None]
        return (weight * inverse)[:, None] * inner, grad_weight, grad_bias, None, None


class SumsWrittenOver(Function):
    """The tensors that all_reduce has changed are returned."""

    forward = SumsAndSquares.forward

    @staticmethod
    def backward(ctx, grad):
        x_hat, weight, inverse, total = ctx.saved_tensors
        grad_bias, grad_weight = grad.sum(DIMS), (grad * x_hat).sum(DIMS)
        dist.all_reduce(grad_bias, group=ctx.group)
        dist.all_reduce(grad_weight, group=ctx.group)
        inner = grad - (grad_bias[:, None] + x_hat * grad_weight[:, None]) / total
        return (weight * inverse)[:, None] * inner, grad_weight, grad_bias, None, None


class Swapped(Function):
    forward = SumsAndSquares.forward

    @staticmethod
    def backward(ctx, grad):
        grad_x, grad_weight, grad_bias, *rest = SumsAndSquares.backward(ctx, grad)
        return grad_x, grad_bias, grad_weight, *rest


class WithoutNones(Function):
    forward = SumsAndSquares.forward

    @staticmethod
    def backward(ctx, grad):
        return SumsAndSquares.backward(ctx, grad)[:3]


class InPlace(Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps, group):
        y = SumsAndSquares.forward(ctx, x, weight, bias, eps, group)
        x.data.copy_(y)
        return y

    backward = SumsAndSquares.backward


class WithoutAReturn(Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps, group):
        SumsAndSquares.forward(ctx, x, weight, bias, eps, group)

    backward = SumsAndSquares.backward


class NormByLabcode(Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps, group):
        module = WholeBatchNorm(group, x.shape[1], eps=eps, dtype=x.dtype)
        y = module(x)
        ctx.save_for_backward(y, weight)
        return weight[:, None] * y + bias[:, None]

    @staticmethod
    def backward(ctx, grad):
        return grad, grad.sum(DIMS), grad.sum(DIMS), None, None


def a_plain_function(x, weight, bias, eps, group):
    return torch.nn.functional.batch_norm(x, None, None, weight, bias, True, eps=eps)


BATCH_NORM = Answers(
    check=l07.batch_norm,
    right={
        "sums and squares in one message": SumsAndSquares,
        "the mean, and then the squares": MeanThenSquares,
        "everybody's statistics gathered": Gathered,
    },
    wrong={
        "own statistics": (OwnStatistics, "statistics of this rank's samples alone"),
        "averages statistics": (AveragesStatistics, "the ranks' means differ too"),
        "every rank counts alike": (EveryRankCountsAlike, "every rank counts as much"),
        "backward as if constants": (ConstantStatistics, "as if mean and var were constants"),
        "own sums in backward": (OwnSums, "in backward the sums go over this rank's samples"),
        "own count in backward": (OwnCount, "by the number of this rank's values"),
        "weight gradients of all": (SumsWrittenOver, "is the sum over all ranks already"),
        "nothing travels": (NothingTravels, "nothing travels in forward"),
        "in the world": (NormInTheWorld, "with ranks 0, 1, 2 and 3 it is right"),
        "gathers the batch": (GathersTheBatch, "do samples travel"),
        "one value less": (Unbiased, "divided by one value less"),
        "eps outside of the root": (EpsOutside, "eps is added to the root"),
        "swapped": (Swapped, "weight and bias are swapped"),
        "no None": (WithoutNones, "None for what has no gradient"),
        "writes into x": (InPlace, "x has changed"),
        "no return": (WithoutAReturn, "it returned None"),
        "labcode's": (NormByLabcode, "labcode's own"),
        "no Function": (a_plain_function, "hand in the class"),
        "no bias": (WithoutBias, "where is bias?"),
        "negative variance": (NegativeVariance, "y has inf or nan"),
    },
)

ANSWERS = {
    "7.1": DIFFERING,
    "7.2": CHART,
    "7.3": DATA,
    "7.4": WEIGHTS,
    "7.5": BATCH_NORM,
    "7.6": GRADIENTS,
    "7.7": ROLL_CALL,
    "7.8": WAITING,
    "7.9": SHARES,
    "7.10": NIGHT,
}
