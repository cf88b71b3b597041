"""Answers to the exercises of lesson 06, large batches and convergence."""

import contextlib
import math

import numpy as np
import torch
import torch.distributed as dist
from answers import Answers

from labcode.teach.exercises import l06
from labcode.teach.labs import l06_by_hand

# ---- 6.1 two equations


def by_subtraction(b, small, big_b, big):
    variance = (small - big) / (1 / b - 1 / big_b)
    return big - variance / big_b, variance


def as_in_the_paper(b, small, big_b, big):
    square = (big_b * big - b * small) / (big_b - b)
    return square, (small - square) * b


def as_a_system(b, small, big_b, big):
    square, variance = np.linalg.solve([[1, 1 / b], [1, 1 / big_b]], [small, big])
    return float(square), float(variance)


def swapped(b, small, big_b, big):
    return by_subtraction(b, small, big_b, big)[::-1]


def big_is_true(b, small, big_b, big):
    return big, (small - big) / (1 / b - 1 / big_b)


def plain_difference(b, small, big_b, big):
    return as_in_the_paper(b, small, big_b, big)[0], small - big


def the_ratio(b, small, big_b, big):
    square, variance = by_subtraction(b, small, big_b, big)
    return variance / square


def nothing(*_):
    return None


def wrong_sign(b, small, big_b, big):
    variance = (small - big) / (1 / big_b - 1 / b)
    return big - variance / big_b, variance


ESTIMATE = Answers(
    check=lambda answer, ranks: l06.estimate(answer),
    right={
        "subtract": by_subtraction,
        "the paper's": as_in_the_paper,
        "a system of equations": as_a_system,
    },
    wrong={
        "changed places": (swapped, "|G|^2 comes first"),
        "the big batch has no noise": (big_is_true, "still has noise in it"),
        "a plain difference": (plain_difference, "difference of the two squares is not"),
        "the ratio": (the_ratio, "return two numbers"),
        "no return": (nothing, "returned None"),
        "wrong sign": (wrong_sign, "your variance is -"),
    },
)

# ---- 6.2 squares of a step


def in_a_loop(model, group):
    small = torch.zeros(1, dtype=torch.float64)
    big = 0.0
    for param in model.parameters():
        if param.grad is not None:
            small += param.grad.square().sum()
            dist.all_reduce(param.grad, group=group)
            param.grad /= group.size()
            big += param.grad.square().sum().item()
    dist.all_reduce(small, group=group)
    return small.item() / group.size(), big


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


def _grads(model):
    return [param.grad for param in model.parameters() if param.grad is not None]


def _square(grads):
    return sum(grad.square().sum() for grad in grads)


def own_small(model, group):
    small = _square(_grads(model)).item()
    return small, in_a_loop(model, group)[1]


def after_the_mean(model, group):
    _, big = in_a_loop(model, group)
    return big, big


def group_ignored(model, group):
    small = _square(_grads(model))
    dist.all_reduce(small)
    for grad in _grads(model):
        dist.all_reduce(grad)
        grad /= dist.get_world_size()
    return small.item() / dist.get_world_size(), _square(_grads(model)).item()


def small_summed(model, group):
    small, big = in_a_loop(model, group)
    return small * group.size(), big


def grads_not_averaged(model, group):
    copies = [grad.clone() for grad in _grads(model)]
    small = _square(copies)
    dist.all_reduce(small, group=group)
    for copy in copies:
        dist.all_reduce(copy, group=group)
        copy /= group.size()
    return small.item() / group.size(), _square(copies).item()


def a_sum(model, group):
    small = _square(_grads(model))
    dist.all_reduce(small, group=group)
    for grad in _grads(model):
        dist.all_reduce(grad, group=group)
    return small.item() / group.size(), _square(_grads(model)).item()


def all_gathered(model, group):
    row = torch.cat([grad.flatten() for grad in _grads(model)])
    rows = [torch.empty_like(row) for _ in range(group.size())]
    dist.all_gather(rows, row, group=group)
    small = sum(r.dot(r) for r in rows) / group.size()
    return small, in_a_loop(model, group)[1]


def big_before(model, group):
    small = _square(_grads(model))
    dist.all_reduce(small, group=group)
    small = small.item() / group.size()
    in_a_loop(model, group)
    return small, small


SQUARES = Answers(
    check=l06.squares,
    right={
        "in a loop": in_a_loop,
        "one message for all": with_one_row,
        "with norms": with_norms,
    },
    wrong={
        "its own small square": (own_small, "this rank's own square"),
        "after the mean": (after_the_mean, "before it is averaged"),
        "the group is ignored": (group_ignored, "rank"),
        "the small ones are summed": (small_summed, "sum of the small squares"),
        "gradients stay": (grads_not_averaged, "still holds the rank's own gradient"),
        "a sum of gradients": (a_sum, "divide the sum by the size of the group"),
        "gathers all gradients": (all_gathered, "bytes travel beside the gradients"),
        "big from before": (big_before, "after it has been averaged"),
    },
)

# ---- 6.3 smoothed


class Plain:
    def __init__(self, keep=0.9):
        self.keep, self.square, self.variance = keep, 0.0, 0.0

    def add(self, square, variance):
        self.square = self.keep * self.square + (1 - self.keep) * square
        self.variance = self.keep * self.variance + (1 - self.keep) * variance

    def noise_scale(self):
        return self.variance / self.square


class Unscaled(Plain):
    """Sums that fade: the factor 1 - keep cancels."""

    def add(self, square, variance):
        self.square = self.keep * self.square + square
        self.variance = self.keep * self.variance + variance


class InAnArray(Plain):
    def __init__(self, keep=0.9):
        self.keep = keep
        self.both = np.zeros(2)

    def add(self, square, variance):
        self.both += (1 - self.keep) * (np.array([square, variance]) - self.both)

    def noise_scale(self):
        return self.both[1] / self.both[0]


class Ratios(Plain):
    def __init__(self, keep=0.9):
        self.keep, self.value, self.weight = keep, 0.0, 0.0

    def add(self, square, variance):
        self.value = self.keep * self.value + (1 - self.keep) * variance / square
        self.weight = self.keep * self.weight + 1 - self.keep

    def noise_scale(self):
        return self.value / self.weight


class LastOnly(Plain):
    def add(self, square, variance):
        self.square, self.variance = square, variance


class AllAlike(Plain):
    def add(self, square, variance):
        self.square += square
        self.variance += variance


class WrongWay(Plain):
    def add(self, square, variance):
        self.square = (1 - self.keep) * self.square + self.keep * square
        self.variance = (1 - self.keep) * self.variance + self.keep * variance


class UpsideDown(Plain):
    def noise_scale(self):
        return self.square / self.variance


class NoReturn(Plain):
    def noise_scale(self):
        self.variance / self.square


SMOOTHED = Answers(
    check=lambda answer, ranks: l06.smoothed(answer),
    right={"as defined": Plain, "without the factor": Unscaled, "in an array": InAnArray},
    wrong={
        "smooths ratios": (Ratios, "you smooth ratios"),
        "the last step": (LastOnly, "the last step alone"),
        "all alike": (AllAlike, "old ones must fade"),
        "keep the wrong way": (WrongWay, "the new step counts for `keep`"),
        "upside down": (UpsideDown, "the noise scale is 30"),
        "no return": (NoReturn, "returned None"),
    },
)

# ---- 6.4 a sweep


def two_loops(batches, rates, steps_to_target, table):
    for batch in batches:
        for lr in rates:
            if (batch, lr) not in table:
                try:
                    table[batch, lr] = steps_to_target(batch, lr)
                except ArithmeticError:
                    table[batch, lr] = None
    best = {}
    for (batch, lr), steps in table.items():
        if steps is not None and (batch not in best or steps < best[batch][1]):
            best[batch] = (lr, steps)
    return best


def batch_by_batch(batches, rates, steps_to_target, table):
    best = {}
    for batch in batches:
        found = []
        for lr in rates:
            if (batch, lr) not in table:
                table[(batch, lr)] = None
                with contextlib.suppress(Exception):
                    table[(batch, lr)] = steps_to_target(batch, lr)
            if table[(batch, lr)]:
                found.append((table[(batch, lr)], lr))
        if found:
            steps, lr = min(found)
            best[batch] = lr, steps
    return best


def with_product(batches, rates, steps_to_target, table):
    import itertools

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


def never_catches(batches, rates, steps_to_target, table):
    for batch in batches:
        for lr in rates:
            table[batch, lr] = steps_to_target(batch, lr)
    return {}


def never_looks(batches, rates, steps_to_target, table):
    return two_loops(batches, rates, steps_to_target, clear(table))


def clear(table):
    table.clear()
    return table


def failures_are_not_kept(batches, rates, steps_to_target, table):
    for batch in batches:
        for lr in rates:
            if (batch, lr) not in table:
                try:
                    table[batch, lr] = steps_to_target(batch, lr)
                except ArithmeticError:
                    continue
    return {}


def none_is_missing(batches, rates, steps_to_target, table):
    for batch in batches:
        for lr in rates:
            if table.get((batch, lr)) is None:
                try:
                    table[batch, lr] = steps_to_target(batch, lr)
                except ArithmeticError:
                    table[batch, lr] = None
    return two_loops(batches, rates, steps_to_target, table)


def most_steps(batches, rates, steps_to_target, table):
    two_loops(batches, rates, steps_to_target, table)
    best = {}
    for (batch, lr), steps in table.items():
        if steps is not None and (batch not in best or steps > best[batch][1]):
            best[batch] = (lr, steps)
    return best


def steps_first(batches, rates, steps_to_target, table):
    best = two_loops(batches, rates, steps_to_target, table)
    return {batch: way[::-1] for batch, way in best.items()}


def kept_at_the_end(batches, rates, steps_to_target, table):
    new = {}
    for batch in batches:
        for lr in rates:
            if (batch, lr) in table:
                continue
            try:
                new[batch, lr] = steps_to_target(batch, lr)
            except ArithmeticError:
                new[batch, lr] = None
    table.update(new)
    return two_loops(batches, rates, steps_to_target, table)


def catches_all(batches, rates, steps_to_target, table):
    for batch in batches:
        for lr in rates:
            if (batch, lr) in table:
                continue
            try:
                table[batch, lr] = steps_to_target(batch, lr)
            except BaseException:
                table[batch, lr] = None
    return two_loops(batches, rates, steps_to_target, table)


def none_for_a_batch(batches, rates, steps_to_target, table):
    best = two_loops(batches, rates, steps_to_target, table)
    return {batch: best.get(batch) for batch in batches}


def returns_the_table(batches, rates, steps_to_target, table):
    two_loops(batches, rates, steps_to_target, table)
    return table


SWEEP = Answers(
    check=lambda answer, ranks: l06.sweep(answer),
    right={"two loops": two_loops, "batch by batch": batch_by_batch, "product": with_product},
    wrong={
        "kept at the end": (kept_at_the_end, "as soon as it is there"),
        "catches all": (catches_all, "catch ArithmeticError alone"),
        "None for a batch without": (none_for_a_batch, "leave that batch out"),
        "never catches": (never_catches, "ended the sweep"),
        "never looks": (never_looks, "was in `table` already"),
        "failures are not kept": (failures_are_not_kept, "has no entry for (4, 0.1)"),
        "None is missing": (none_is_missing, "None is an entry, too"),
        "most steps": (most_steps, "needs fewest steps"),
        "steps first": (steps_first, "the rate comes first"),
        "the table": (returns_the_table, "the best rate of batch 4 is missing"),
    },
)

# ---- 6.5 the verdict


def by_polyfit(steps_of):
    batches = np.array(list(steps_of))
    steps = np.array(list(steps_of.values()))
    slope, intercept = np.polyfit(1 / batches, steps, 1, w=1 / steps)
    return intercept, slope


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


def fit_swapped(steps_of):
    return by_polyfit(steps_of)[::-1]


def the_ends(steps_of):
    return steps_of[max(steps_of)], min(steps_of) * steps_of[min(steps_of)]


def the_critical(steps_of):
    least_steps, least_samples = by_polyfit(steps_of)
    return least_steps, least_samples / least_steps


def over_the_batch(steps_of):
    slope, intercept = np.polyfit(list(steps_of), list(steps_of.values()), 1)
    return intercept, slope


def smallest_batch(steps_of):
    return by_polyfit(steps_of)[0], min(steps_of) * steps_of[min(steps_of)]


def through_the_ends(steps_of):
    first, last = min(steps_of), max(steps_of)
    slope = (steps_of[first] - steps_of[last]) / (1 / first - 1 / last)
    return steps_of[last] - slope / last, slope


def weighted_upside_down(steps_of):
    batches = np.array(list(steps_of))
    steps = np.array(list(steps_of.values()))
    slope, intercept = np.polyfit(1 / batches, steps, 1, w=steps)
    return intercept, slope


def as_an_array(steps_of):
    return np.array(by_polyfit(steps_of))


FIT = Answers(
    check=lambda answer, ranks: l06.fit(answer),
    right={
        "polyfit": by_polyfit,
        "lstsq": by_lstsq,
        "by hand": by_hand,
        "an array": as_an_array,
    },
    wrong={
        "through the first and the last point": (through_the_ends, "does every point count"),
        "weights upside down": (weighted_upside_down, "with which weight"),
        "changed places": (fit_swapped, "S_min comes first"),
        "the two ends": (the_ends, "steps of the largest batch"),
        "the critical batch": (the_critical, "that is the critical batch"),
        "over the batch": (over_the_batch, "yours are"),
        "the smallest batch": (smallest_batch, "samples of the smallest batch"),
        "no return": (nothing, "returned None"),
    },
)

# ---- 6.6 broken runs

NO_GUARD = {"optim.lr": 3.0, "optim.min_lr": 3.0, "optim.warmup_steps": 0, "optim.clip_norm": 0.0}
SHORT = {"data.val_fraction": 0.9995, "optim.lr": 1e-2, "train.steps": 600}

BROKEN = Answers(
    check=lambda answer, ranks: l06.broken(*answer),
    right={
        "no guard": (NO_GUARD, SHORT),
        "a rate of 30": ({"optim.lr": 30.0, "optim.min_lr": 3.0}, SHORT),
        "many samples of little text": (
            NO_GUARD,
            {"data.val_fraction": 0.999, "train.global_batch": 64, "optim.lr": 2e-2},
        ),
    },
    wrong={
        "a bad rate that learns": (({"optim.lr": 3e-2}, SHORT), "it still learns something"),
        "nothing changed": (({}, SHORT), "the dict is empty"),
        "no such field": (({"optim.rate": 1.0}, SHORT), "diverges: "),
        "an absurd rate": (({"optim.lr": 1e9}, SHORT), "overflows at the first step"),
        "not the optimizer": (({"train.steps": 10}, SHORT), "with fields of `optim`"),
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


class Outer:
    def __init__(self, model, group, lr, momentum):
        self.params = list(model.parameters())
        self.group = group
        self.lr = lr
        self.momentum = momentum
        self.common = [param.detach().clone() for param in self.params]
        self.velocity = [torch.zeros_like(param) for param in self.params]

    def mean(self, tensor):
        dist.all_reduce(tensor, group=self.group)
        return tensor / self.group.size()

    @torch.no_grad()
    def step(self):
        for param, common, velocity in zip(self.params, self.common, self.velocity):
            gone = self.mean(common - param)
            velocity *= self.momentum
            velocity += gone
            common -= self.lr * (gone + self.momentum * velocity)
            param.copy_(common)


class WithSGD(Outer):
    def __init__(self, model, group, lr, momentum):
        super().__init__(model, group, lr, momentum)
        self.optimizer = torch.optim.SGD(self.common, lr=lr, momentum=momentum, nesterov=True)

    def step(self):
        for param, common in zip(self.params, self.common):
            common.grad = self.mean(common - param.detach())
        self.optimizer.step()
        for param, common in zip(self.params, self.common):
            param.data.copy_(common)


class OneRow(Outer):
    @torch.no_grad()
    def step(self):
        gone = [common - param for common, param in zip(self.common, self.params)]
        row = self.mean(torch.cat([one.flatten() for one in gone]))
        parts = row.split([one.numel() for one in gone])
        for number, part in enumerate(parts):
            way = part.view_as(gone[number])
            self.velocity[number] = self.momentum * self.velocity[number] + way
            step = way + self.momentum * self.velocity[number]
            self.common[number] = self.common[number] - self.lr * step
            self.params[number].copy_(self.common[number])


class MeanOfWeights(Outer):
    @torch.no_grad()
    def step(self):
        for param in self.params:
            param.copy_(self.mean(param.clone()))


class NoMomentum(Outer):
    @torch.no_grad()
    def step(self):
        for param, common in zip(self.params, self.common):
            common -= self.lr * self.mean(common - param)
            param.copy_(common)


class WrongDirection(Outer):
    @torch.no_grad()
    def step(self):
        for param, common, velocity in zip(self.params, self.common, self.velocity):
            gone = self.mean(param - common)
            velocity.mul_(self.momentum).add_(gone)
            common -= self.lr * (gone + self.momentum * velocity)
            param.copy_(common)


class NeverCopiedBack(Outer):
    @torch.no_grad()
    def step(self):
        for param, common, velocity in zip(self.params, self.common, self.velocity):
            gone = self.mean(common - param)
            velocity.mul_(self.momentum).add_(gone)
            common -= self.lr * (gone + self.momentum * velocity)


class CommonForgotten(Outer):
    @torch.no_grad()
    def step(self):
        for param, common, velocity in zip(self.params, self.common, self.velocity):
            gone = self.mean(common - param)
            velocity.mul_(self.momentum).add_(gone)
            param.copy_(common - self.lr * (gone + self.momentum * velocity))


class WholeWorld(Outer):
    def mean(self, tensor):
        dist.all_reduce(tensor)
        return tensor / dist.get_world_size()


class NoMessage(Outer):
    def mean(self, tensor):
        return tensor


class HeavyBall(Outer):
    @torch.no_grad()
    def step(self):
        for param, common, velocity in zip(self.params, self.common, self.velocity):
            velocity.mul_(self.momentum).add_(self.mean(common - param))
            common -= self.lr * velocity
            param.copy_(common)


OUTER = Answers(
    check=l06.outer_step,
    right={"by hand": Outer, "with SGD": WithSGD, "one message": OneRow},
    wrong={
        "the mean of the weights": (MeanOfWeights, "plain mean of the weights"),
        "no momentum": (NoMomentum, "where is the momentum"),
        "the wrong direction": (WrongDirection, "walk back"),
        "never copied back": (NeverCopiedBack, "leaves the weights as they are"),
        "common forgotten": (CommonForgotten, "from one round to the next"),
        "the whole world": (WholeWorld, "rank"),
        "no message": (NoMessage, "no collective was called"),
        "heavy ball": (HeavyBall, "where is the momentum"),
        "labcode's": (l06_by_hand.OuterStep, "labcode"),
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
