"""Answers to the exercises of lesson 06, large batches and convergence."""

import contextlib
import itertools
import math

import numpy as np
import torch
import torch.distributed as dist
from answers import Answers, changed

# ---- 6.1 two equations


def as_in_the_paper(b, small, big_b, big):
    square = (big_b * big - b * small) / (big_b - b)
    return square, (small - square) * b


def as_a_system(b, small, big_b, big):
    square, variance = np.linalg.solve([[1, 1 / b], [1, 1 / big_b]], [small, big])
    return float(square), float(variance)


RETURN = "return square, variance"

ESTIMATE = Answers(
    solves="estimate",
    takes_ranks=False,
    right={"the paper's": as_in_the_paper, "a system of equations": as_a_system},
    wrong={
        "changed places": (changed(f"{RETURN} => return variance, square"), "|G|^2 comes first"),
        "the big batch has no noise": (
            changed(f"{RETURN} => return big_square, variance"),
            "still has noise in it",
        ),
        "a plain difference": (
            changed(f"{RETURN} => return square, small_square - big_square"),
            "difference of the two squares is not",
        ),
        "the ratio": (changed(f"{RETURN} => return variance / square"), "return two numbers"),
        "no return": (changed(f"{RETURN} => pass"), "returned None"),
        "wrong sign": (
            changed("1 / small_batch - 1 / big_batch => 1 / big_batch - 1 / small_batch"),
            "your variance is -",
        ),
        "cut off at 0": (
            changed(f"{RETURN} => return max(0.0, square), variance"),
            "can give a |G|^2 below zero",
        ),
    },
)

# ---- 6.2 squares of a step


def with_one_row(model, group):
    params = [param for param in model.parameters() if param.grad is not None]
    row = torch.cat([param.grad.flatten() for param in params])
    message = torch.cat([row, row.dot(row)[None]]) / dist.get_world_size(group)
    dist.all_reduce(message, group=group)
    for param, part in zip(params, message[:-1].split([p.numel() for p in params])):
        param.grad.copy_(part.view_as(param))
    return message[-1], message[:-1].dot(message[:-1])


def with_norms(model, group):
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    small = torch.nn.utils.get_total_norm(grads) ** 2 / group.size()
    dist.all_reduce(small, group=group)
    for grad in grads:
        grad /= group.size()
        dist.all_reduce(grad, group=group)
    return small.item(), torch.nn.utils.get_total_norm(grads).item() ** 2


SEND_SMALL = "dist.all_reduce(small, group=group)"
SEND_GRADIENT = "dist.all_reduce(param.grad, group=group)"
GATHER = """row = torch.cat([param.grad.flatten() for param in params])
    rows = [torch.empty_like(row) for _ in range(p)]
    dist.all_gather(rows, row, group=group)
    small = sum(one.dot(one) for one in rows)"""

SQUARES = Answers(
    solves="squares",
    right={"one message for all": with_one_row, "with norms": with_norms},
    wrong={
        "its own small square": (
            changed(f"{SEND_SMALL} => pass", "small.item() / p => small.item()"),
            "this rank's own square",
        ),
        "after the mean": (
            changed("return small.item() / p, big => return big, big"),
            "before it is averaged",
        ),
        "the group is ignored": (
            changed(", group=group => ", "get_world_size(group) => get_world_size()"),
            "with ranks 0-3 it is right",
        ),
        "a number for each weight": (
            changed(
                "small += param.grad.double().square().sum() => "
                "square = param.grad.double().square().sum()\n"
                "        dist.all_reduce(square, group=group)\n        small += square",
                f"{SEND_SMALL} => pass",
            ),
            "bytes travel beside the gradients",
        ),
        "the small ones are summed": (
            changed("small.item() / p => small.item()"),
            "sum of the small squares",
        ),
        "gradients stay": (
            changed(
                f"{SEND_GRADIENT} => grad = param.grad.clone()\n"
                "        dist.all_reduce(grad, group=group)",
                "param.grad /= p => grad /= p",
                "big += param.grad => big += grad",
            ),
            "still holds the rank's own gradient",
        ),
        "a sum of gradients": (
            changed("param.grad /= p => pass"),
            "divide the sum by the size of the group",
        ),
        "gathers all gradients": (
            changed(f"{SEND_SMALL} => {GATHER}"),
            "bytes travel beside the gradients",
        ),
        "big from before": (
            changed("return small.item() / p, big => return small.item() / p, small.item() / p"),
            "after it has been averaged",
        ),
    },
)

# ---- 6.3 smoothed


class InAnArray:
    def __init__(self, keep=0.9):
        self.keep = keep
        self.both = np.zeros(2)

    def add(self, square, variance):
        self.both += (1 - self.keep) * (np.array([square, variance]) - self.both)

    def noise_scale(self):
        return self.both[1] / self.both[0]


SQUARE = "self.square = self.keep * self.square + (1 - self.keep) * square"
VARIANCE = "self.variance = self.keep * self.variance + (1 - self.keep) * variance"
RATIO = "self.variance / self.square"

SMOOTHED = Answers(
    solves="Smoothed",
    takes_ranks=False,
    right={
        "without the factor": changed(
            f"{SQUARE} => self.square = self.keep * self.square + square",
            f"{VARIANCE} => self.variance = self.keep * self.variance + variance",
        ),
        "in an array": InAnArray,
    },
    wrong={
        "smooths ratios": (
            changed(
                f"{SQUARE} => self.square = self.keep * self.square + 1 - self.keep",
                f"{VARIANCE} => {VARIANCE} / square",
            ),
            "you smooth ratios",
        ),
        "the last step": (
            changed(f"{SQUARE} => self.square = square", f"{VARIANCE} => self.variance = variance"),
            "the last step alone",
        ),
        "all alike": (
            changed(
                f"{SQUARE} => self.square += square",
                f"{VARIANCE} => self.variance += variance",
            ),
            "old ones must fade",
        ),
        "keep the wrong way": (
            changed("+ (1 - self.keep) * => + self.keep *", "= self.keep * => = (1 - self.keep) *"),
            "the new step counts for `keep`",
        ),
        "upside down": (
            changed(f"{RATIO} => self.square / self.variance"),
            "the noise scale is 30",
        ),
        "no return": (changed(f"return {RATIO} => {RATIO}"), "returned None"),
    },
)

# ---- 6.4 a sweep


def batch_by_batch(batches, rates, steps_to_target, table):
    best = {}
    for batch in batches:
        found = []
        for lr in rates:
            if (batch, lr) not in table:
                steps = None
                with contextlib.suppress(Exception):
                    steps = steps_to_target(batch, lr)
                table[(batch, lr)] = steps
            if table[(batch, lr)]:
                found.append((table[(batch, lr)], lr))
        if found:
            steps, lr = min(found)
            best[batch] = lr, steps
    return best


def with_product(batches, rates, steps_to_target, table):
    missing = [pair for pair in itertools.product(batches, rates) if pair not in table]
    for pair in missing:
        try:
            steps = steps_to_target(*pair)
        except ArithmeticError:
            steps = None
        table[pair] = steps
    best = {}
    for batch in batches:
        ways = {lr: table[batch, lr] or math.inf for lr in rates}
        lr = min(ways, key=ways.get)
        if ways[lr] < math.inf:
            best[batch] = (lr, ways[lr])
    return best


SWEEP = Answers(
    solves="sweep",
    takes_ranks=False,
    right={"batch by batch": batch_by_batch, "product": with_product},
    wrong={
        "kept at the end": (
            changed(
                "for batch in batches => new = {}\n    for batch in batches",
                "table[batch, lr] = => new[batch, lr] =",
                "best = {} => table.update(new)\n    best = {}",
            ),
            "as soon as it is there",
        ),
        "an entry before the run": (
            changed("try: => table[batch, lr] = None\n            try:"),
            "after a restart it would be left out",
        ),
        "catches all": (
            changed("except ArithmeticError => except BaseException"),
            "catch ArithmeticError alone",
        ),
        "None for a batch without": (
            changed("return best => return {batch: best.get(batch) for batch in batches}"),
            "leave that batch out",
        ),
        "never catches": (changed("except ArithmeticError => except KeyError"), "ended the sweep"),
        "never looks": (changed("if (batch, lr) in table => if False"), "was in `table` already"),
        "failures are not kept": (
            changed("table[batch, lr] = None => continue"),
            "has no entry for (4, 0.1)",
        ),
        "None is missing": (
            changed("if (batch, lr) in table => if table.get((batch, lr)) is not None"),
            "None is an entry, too",
        ),
        "most steps": (changed("steps < best => steps > best"), "needs fewest steps"),
        "steps first": (
            changed("return best => return {batch: way[::-1] for batch, way in best.items()}"),
            "the rate comes first",
        ),
        "the table": (
            changed("return best => return table"),
            "the best rate of batch 4 is missing",
        ),
    },
)

# ---- 6.5 the verdict


def by_lstsq(steps_of):
    columns = np.array([[1, 1 / batch] for batch in steps_of])
    found, *_ = np.linalg.lstsq(columns, np.array(list(steps_of.values())), rcond=None)
    return tuple(found)


def by_hand(steps_of):
    x = [1 / batch for batch in steps_of]
    y = list(steps_of.values())
    mean_x = sum(x) / len(x)
    mean_y = sum(y) / len(y)
    above = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y))
    slope = above / sum((a - mean_x) ** 2 for a in x)
    return mean_y - slope * mean_x, slope


def through_the_ends(steps_of):
    first, last = min(steps_of), max(steps_of)
    slope = (steps_of[first] - steps_of[last]) / (1 / first - 1 / last)
    return steps_of[last] - slope / last, slope


LINE = "return intercept, slope"

FIT = Answers(
    solves="fit",
    takes_ranks=False,
    right={
        "lstsq": by_lstsq,
        "by hand": by_hand,
        "an array": changed(f"{LINE} => return np.array([intercept, slope])"),
    },
    wrong={
        "through the first and the last point": (through_the_ends, "does every point count"),
        "weights upside down": (changed("w=1 / steps => w=steps"), "with which weight"),
        "changed places": (changed(f"{LINE} => return slope, intercept"), "S_min comes first"),
        "the two ends": (
            changed(f"{LINE} => return steps[-1], batches[0] * steps[0]"),
            "steps of the largest batch",
        ),
        "the critical batch": (
            changed(f"{LINE} => return intercept, slope / intercept"),
            "that is the critical batch",
        ),
        "over the batch": (changed("polyfit(1 / batches => polyfit(batches"), "yours are"),
        "the smallest batch": (
            changed(f"{LINE} => return intercept, batches[0] * steps[0]"),
            "samples of the smallest batch",
        ),
        "no return": (changed(f"{LINE} => pass"), "returned None"),
    },
)

# ---- 6.6 broken runs

NO_GUARD = {"optim.lr": 3.0, "optim.min_lr": 3.0, "optim.warmup_steps": 0, "optim.clip_norm": 0.0}
SHORT = {"data.val_fraction": 0.9995, "optim.lr": 1e-2, "train.steps": 600}

BROKEN = Answers(
    solves=("diverges", "overfits"),
    takes_ranks=False,
    real=True,
    right={
        "no guard": (NO_GUARD, SHORT),
        "many samples of little text": (
            NO_GUARD,
            {"data.val_fraction": 0.999, "train.global_batch": 64, "optim.lr": 2e-2},
        ),
    },
    wrong={
        "a bad rate that learns": (({"optim.lr": 3e-2}, SHORT), "it has to end worse than that"),
        "nothing changed": (({}, SHORT), "the dict is empty"),
        "no such field": (({"optim.rate": 1.0}, SHORT), "diverges: "),
        "an absurd rate": (({"optim.lr": 1e9}, SHORT), "overflows at the first step"),
        "not the optimizer": (({"train.steps": 10}, SHORT), "with fields of `optim`"),
        "not the optimizer alone": (
            (NO_GUARD | {"train.steps": 10}, SHORT),
            "with fields of `optim` alone",
        ),
        "long training alone": (
            (NO_GUARD, {"train.steps": 300, "optim.lr": 1e-2}),
            "how often does the run see its text?",
        ),
        "too few steps": (
            (NO_GUARD, {"data.val_fraction": 0.9995, "train.steps": 20}),
            "learns too little",
        ),
    },
)

# ---- 6.7 the outer step


class Begun:
    """What the exercise gives."""

    def __init__(self, model, group, lr, momentum):
        self.params = list(model.parameters())
        self.group = group
        self.lr = lr
        self.momentum = momentum
        self.common = [param.detach().clone() for param in self.params]
        self.velocity = [torch.zeros_like(param) for param in self.params]


class WithSGD(Begun):
    def __init__(self, model, group, lr, momentum):
        super().__init__(model, group, lr, momentum)
        self.optimizer = torch.optim.SGD(self.common, lr=lr, momentum=momentum, nesterov=True)

    def step(self):
        for param, common in zip(self.params, self.common):
            gone = common - param.detach()
            dist.all_reduce(gone, group=self.group)
            common.grad = gone / self.group.size()
        self.optimizer.step()
        for param, common in zip(self.params, self.common):
            param.data.copy_(common)


class OneRow(Begun):
    @torch.no_grad()
    def step(self):
        gone = [common - param for common, param in zip(self.common, self.params)]
        row = torch.cat([one.flatten() for one in gone]) / self.group.size()
        dist.all_reduce(row, group=self.group)
        parts = row.split([one.numel() for one in gone])
        for number, part in enumerate(parts):
            way = part.view_as(gone[number])
            self.velocity[number] = self.momentum * self.velocity[number] + way
            step = way + self.momentum * self.velocity[number]
            self.common[number] = self.common[number] - self.lr * step
            self.params[number].copy_(self.common[number])


NESTEROV = "common -= self.lr * (gone + self.momentum * velocity)"

OUTER = Answers(
    solves="OuterStep",
    right={"with SGD": WithSGD, "one message": OneRow},
    wrong={
        "the mean of the weights": (
            changed(f"{NESTEROV} => common -= gone"),
            "plain mean of the weights",
        ),
        "no momentum": (
            changed(f"{NESTEROV} => common -= self.lr * gone"),
            "where is the momentum",
        ),
        "the wrong direction": (changed("common - param => param - common"), "walk back"),
        "never copied back": (
            changed("param.copy_(common) => pass"),
            "leaves the weights as they are",
        ),
        "common forgotten": (
            changed(
                "common -= => new = common -",
                "param.copy_(common) => param.copy_(new)",
            ),
            "from one round to the next",
        ),
        "the whole world": (
            changed(", group=self.group => ", "get_world_size(self.group) => get_world_size()"),
            "with ranks 0-3 it is right",
        ),
        "no message": (
            changed("dist.all_reduce(gone, group=self.group) => gone *= p"),
            "no collective was called",
        ),
        "a sum": (changed("gone /= p => pass"), "and this is their sum"),
        "heavy ball": (
            changed(f"{NESTEROV} => common -= self.lr * velocity"),
            "where is the momentum",
        ),
    },
)

ANSWERS = {
    "6.1": ESTIMATE,
    "6.2": SQUARES,
    "6.3": SMOOTHED,
    "6.4": SWEEP,
    "6.5": FIT,
    "6.6": BROKEN,
    "6.7": OUTER,
}
