"""What is wrong with a gradient: judged by what arrived at each step that was really taken.

    A_r = a * sum over ranks of l_r          a is measured: `watch_gradient`
    T   = a * sum of the factors of all means of a loss, over ranks and micro-batches;
          a sum over n values with the factor f counts as a mean with the factor f * n

T is 1 where the gradient is that of the mean over the whole batch, however the loop divides. Where
T cannot be known, nothing is said; nor where it may be meant: a sum over samples, half of a mean.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from labcode.doctor.facts import Facts, Finding
from labcode.runtime.units import ranks_text

UNEVEN = 1.05  # ratio of the weights of two samples in one step
CLOSE = 0.02  # relative, of factors that are measured; bfloat16 has 8 bits
REST = 0.05  # of a gradient that a factor does not explain
WEIGHTED = 0.8  # of a loss that is the largest part of several
SCALED = 1024  # a power of two from here on is the scale of a GradScaler, and nobody's choice
STEPS = 2  # in which something has to be seen: one may be the last of an epoch
SCALE = 0.1  # a gradient that shrinks by more than this after clipping was scaled
LEFT = 0.01  # a norm that nobody clips to

Step = dict[str, Any]


@dataclass(frozen=True)
class _Total:
    """One loss in one step, on all ranks.

    Args:
        value: T.
        count: Backward passes of it on each rank; 0 if their numbers differ.
        factor: Factor in front of the loss.
        averaging: a times the number of ranks: 1 where gradients are averaged once.
        divisor: What it was divided by.
        is_mean: It is written as a mean, and not as a sum.
        losses: What is known of each of them.
        sources: Where the inputs of this rank's passes came from.
    """

    value: float
    count: int
    factor: float
    averaging: float
    divisor: float
    is_mean: bool
    losses: list[dict[str, Any]]
    sources: list[list[int]]


def undivided_losses(facts: list[Facts]) -> Iterator[Finding]:
    """Means of micro-batches that are added up, not averaged.

    Several losses of one step are several losses, not micro-batches, unless they come from the same
    line of code, each after a forward pass of its own, and reach the same weights.
    """
    largest = 0
    unit = "times too large"
    for steps in _steps(facts):
        for total in _totals(steps):
            # nobody has divided by two or more; label smoothing leaves 0.9 of a cross-entropy
            is_sum = WEIGHTED * total.count <= total.value <= (1 + CLOSE) * total.count
            are_means = total.is_mean or total.factor  # or sums, each divided by its own size
            if total.count > 1 and is_sum and are_means and not _is_one_batch(total):
                largest = max(largest, total.count)
                if len(_by_key(steps)) > 1:  # losses of another line may add to it
                    unit = "times too large from one line of code alone"
    if largest:
        what = "the gradient is the sum of the micro-batches' means, not their mean"
        cure = "divide each loss by the number of micro-batches"
        yield Finding("1/m missing", what, _ranks(facts), largest, unit, cure)


def wrong_scale(facts: list[Facts]) -> Iterator[Finding]:
    """A mean over the batch that arrives too small or too large by a whole number."""
    num_ranks = len(facts)
    known = []
    for steps in _steps(facts):
        totals = _totals(steps)
        only = len(totals) == 1 and all(len(step["passes"]) == 1 for step in steps)
        if not only:
            return
        known.append((totals[0], max(len(step["dropped"]) for step in steps)))
    if len(known) < STEPS:
        return
    if not all(total.losses[0]["alone"] for total, _ in known):
        return
    factor = _common([total.factor for total, _ in known])
    averaging = _common([total.averaging for total, _ in known])
    value = _common([total.value for total, _ in known])
    if num_ranks > 1 and _is(factor, 1) and _is(averaging, num_ranks):
        what = "the gradient is the sum over the ranks, not their mean"
        cure = f"divide it by the number of ranks ({num_ranks}), or use ReduceOp.AVG"
        yield _scale("summed over ranks", what, facts, num_ranks, "times too large", cure)
    elif num_ranks > 1 and _is(factor, 1) and _is(averaging * num_ranks, 1):
        what = "the gradient is divided by the number of ranks, though it is their mean already"
        cure = "leave that division out: DDP averages"
        yield _scale("averaged twice", what, facts, num_ranks, "times too small", cure)
    elif value > 0:
        yield from _divided_too_often(facts, known, 1 / value)


def _divided_too_often(
    facts: list[Facts], known: list[tuple[_Total, int]], times: float
) -> Iterator[Finding]:
    """A loss that was divided by a number, in steps of one backward pass."""
    number = round(times)
    if number < 2 or not _is(times, number) or not all(total.is_mean for total, _ in known):
        return
    if all(_is(total.divisor, number) for total, _ in known):
        after_first = [dropped for _, dropped in known]
        if all(dropped == number - 1 for dropped in after_first):
            return  # `lost_micro_batches` says it
        of_classes = all(total.losses[0]["classes"] for total, _ in known)
        # half a squared error is what people mean; half a cross-entropy is not
        if not of_classes and not (number == len(facts) and number > 2):
            return
        what = f"the loss is divided by {number} in steps of one backward pass"
        if number == len(facts):
            what += f", and DDP averages over the {number} ranks by itself"
        cure = "leave the division out, or step after as many micro-batches"
        yield _scale("divided too often", what, facts, number, "times too small", cure)


def _scale(
    name: str, what: str, facts: list[Facts], number: float, unit: str, cure: str
) -> Finding:
    return Finding(name, what, _ranks(facts), number, unit, cure)


def lost_micro_batches(facts: list[Facts]) -> Iterator[Finding]:
    """In each step all backward passes but the last are thrown away."""
    numbers = []
    for steps in _steps(facts):
        numbers.append({_lost(step, fact) for step, fact in zip(steps, facts)})
    # what came before the first step may have been a trial
    is_always = len(numbers) > STEPS and all(number == numbers[1] for number in numbers[1:])
    if is_always and len(numbers[1]) == 1 and max(numbers[1]) > 0:
        number = max(numbers[1])
        what = (
            f"of {number + 1} micro-batches of a step only the last reaches the weights: the "
            "gradients of the others are set to zero before"
        )
        cure = "call zero_grad() once a step, after step()"
        yield Finding("gradients lost", what, _ranks(facts), number, "backward passes a step", cure)


def _lost(step: Step, fact: Facts) -> int:
    """Backward passes of the same loss on other samples that were thrown away before a step."""
    used = step["passes"]
    if len(used) != 1:
        return 0
    kept = _inputs_of(used[0], fact)
    lost = 0
    for one in step["dropped"]:
        inputs = _inputs_of(one, fact)
        if one["key"] == used[0]["key"] and None not in (inputs, kept) and inputs != kept:
            lost += 1
    return lost if lost == len(step["dropped"]) else 0


def _inputs_of(one: dict[str, Any], fact: Facts) -> int | None:
    place = one["forward"] - 1
    return fact.inputs[place] if 0 <= place < len(fact.inputs) else None


def gradients_set_to_zero(facts: list[Facts]) -> Iterator[Finding]:
    """Steps without the gradient that their backward passes have brought."""
    seen = []
    count = 0
    for fact in facts:
        for steps in fact.steps:
            empty = [step for step in steps if _is_emptied(step)]
            if len(empty) >= max(STEPS, len(steps) - 1):  # the first may be a trial
                seen.append(fact)
                count = max(count, len(empty))
    if seen:
        what = "nothing of what the backward passes brought is there at the step"
        cure = "call zero_grad() after step() or before backward(), not between backward() and step"
        yield Finding("gradients lost", what, _ranks(seen), count, "steps", cure)


def _is_emptied(step: Step) -> bool:
    if step["local"] is None or step["arrived"] is None:
        return False
    return any(step["local"]) and not any(step["arrived"])


def loss_scale_left(facts: list[Facts]) -> Iterator[Finding]:
    """Steps with a gradient that is still multiplied by a loss scale."""
    scales = []
    for steps in _steps(facts):
        for total in _totals(steps):
            nearest = 2.0 ** np.round(np.log2(total.value)) if total.value > 0 else 0.0
            is_scale = total.is_mean and nearest >= SCALED and _is(total.value, nearest)
            scales.append(nearest if is_scale else 0.0)
    if len(scales) >= STEPS and all(scales):
        what = "the gradient is still multiplied by the loss scale when the optimizer steps"
        cure = "call scaler.step(optimizer), not optimizer.step()"
        yield Finding("loss scale left", what, _ranks(facts), max(scales), "times too large", cure)


def old_gradients(facts: list[Facts]) -> Iterator[Finding]:
    """Steps whose gradient still contains that of the steps before."""
    seen = []
    count = 0
    for fact in facts:
        for steps in fact.steps:
            stale = [step["stale"] for step in steps]
            if len(stale) > STEPS and all(stale[1:]):
                seen.append(fact)
                count = max(count, sum(stale))
    if seen:
        what = "the gradients of all steps before are still in each step's gradient"
        cure = "call optimizer.zero_grad() once a step"
        yield Finding("zero_grad missing", what, _ranks(seen), count, "steps", cure)


def clipped_while_scaled(facts: list[Facts]) -> Iterator[Finding]:
    """Clipping to a norm while the gradient is still multiplied by a loss scale."""
    seen = []
    scale = 0.0
    for fact in facts:
        for steps in fact.steps:
            for step in steps:
                factor = step["scaled"]
                if 0 < factor < SCALE and 0 < step["max_norm"] * factor < LEFT:
                    seen.append(fact)
                    scale = max(scale, 1 / factor)
    if seen:
        ranks = tuple(sorted({fact.rank for fact in seen}))
        what = "the gradient is clipped while it is still multiplied by the loss scale"
        cure = "call scaler.unscale_(optimizer) before clip_grad_norm_"
        yield Finding("clipped while scaled", what, ranks, scale, "is the scale", cure)


def not_finite(facts: list[Facts]) -> Iterator[Finding]:
    """A step with a gradient of NaN or infinity, and the rank that brought it."""
    for number, steps in enumerate(_steps(facts), start=1):
        arrived = [step["arrived"] for step in steps]
        if None in arrived or all(np.isfinite(values).all() for values in arrived):
            continue
        ranks = tuple(fact.rank for fact, step in zip(facts, steps) if not step["finite"])
        others = tuple(fact.rank for fact in facts if fact.rank not in ranks)
        what = f"step {number} was taken with a gradient that is not finite"
        if ranks and others:
            what = f"{what}: {ranks_text(ranks)} brought it, {ranks_text(others)} did not"
        cure = "look at that batch; leave such a step out on all ranks alike"
        who = ranks or _ranks(facts)
        yield Finding("not finite", what, who, number, "is the first such step", cure)
        return


def summed_losses(facts: list[Facts]) -> Iterator[Finding]:
    """A sum over samples, divided by nothing but the number of ranks."""
    count = 0.0
    num_steps = 0
    for steps in _steps(facts):
        averaging = _averaging(steps)
        if not all(step["passes"] for step in steps):
            return
        for step in steps:
            for one in step["passes"]:
                loss = one["loss"]
                if averaging is None or loss is None or loss["kind"] != "sum":
                    return
                if loss["count"] <= 1 or not _is(loss["factor"] * averaging, 1):
                    return
                count = max(count, loss["count"])
        num_steps += 1
    if num_steps >= STEPS and len(facts) > 1:
        what = (
            "the loss is a sum over samples, and DDP divides by the number of ranks: the gradient "
            "is neither the sum over the whole batch nor the mean"
        )
        cure = "use the mean, or divide by the samples of the whole step and multiply by the ranks"
        unit = "values on a rank"
        yield Finding("summed loss", what, _ranks(facts), count, unit, cure, is_hint=True)


def uneven_means(facts: list[Facts]) -> Iterator[Finding]:
    """Values of one step that count unequally, since means over unequal numbers are averaged.

    In most steps, that is: the last batch of an epoch may be a smaller one.
    """
    ratios = [_unevenness(steps) for steps in _steps(facts)]
    typical = median(ratios) if ratios else 1.0
    if typical > UNEVEN:
        what = "a mean of means: values in small micro-batches count more than those in large ones"
        cure = "sum the losses, divide by the number of values in the whole step over all ranks"
        yield Finding("mean of means", what, _ranks(facts), typical, "times the weight", cure)


def divided_by_all(facts: list[Facts]) -> Iterator[Finding]:
    """Sums that are divided by the number of values on all ranks, and averaged over these again."""
    num_ranks = len(facts)
    num_steps = 0
    for steps in _steps(facts):
        totals = _totals(steps)
        if len(totals) != 1 or totals[0].is_mean or not _is(totals[0].value * num_ranks, 1):
            return
        # half a sum of squares is meant
        others = [loss for loss in totals[0].losses if not loss["classes"]]
        if not all(_is(loss["factor"] * loss["divisor"], 1) for loss in others):
            return
        num_steps += 1
    if num_steps >= STEPS and num_ranks > 1:
        what = (
            "the sum of the losses is divided by the number of values on all ranks, and DDP "
            "averages over the ranks as well"
        )
        cure = f"multiply the loss by the number of ranks ({num_ranks})"
        yield _scale("averaged twice", what, facts, num_ranks, "times too small", cure)


def uneven_windows(facts: list[Facts]) -> Iterator[Finding]:
    """Steps of more or fewer micro-batches than the number by which each loss is divided.

    Those at the end of an epoch make a shorter step, or stay in the first one of the next epoch.
    """
    known = []
    for steps in _steps(facts):
        totals = _totals(steps)
        if len(totals) == 1 and totals[0].count:
            known.append(totals[0])
    counts = [total.count for total in known if _is(total.value, 1)]
    if len(set(counts)) != 1:
        return
    usual = counts[0]
    others = [total for total in known if total.count != usual]
    if others and all(_is(total.value, total.count / usual) for total in others):
        what = (
            f"steps of {others[0].count} micro-batches, each divided by {usual}: the number that "
            "is left at the end of an epoch is another one"
        )
        cure = "divide by the number that the step really has, or leave the last ones out"
        unit = "steps"
        yield Finding("uneven steps", what, _ranks(facts), len(others), unit, cure, is_hint=True)


def needless_syncs(facts: list[Facts]) -> Iterator[Finding]:
    """Gradients that travel at every micro-batch: the same gradient, for more bytes.

    However many lines of code have sent, once in a step is enough.
    """
    seen = [fact for fact in facts if max(fact.syncs, default=0) > 1]
    if seen:
        what = "gradients are sent at more than one micro-batch of a step"
        extra_bytes = (max(map(_sends, seen[0].steps[0])) - 1) * seen[0].gradient_bytes
        cure = (
            "run forward and backward of all micro-batches but the last inside model.no_sync(), "
            "and of the last one outside"
        )
        unit = "B a step too much"
        yield Finding("no_sync missing", what, _ranks(seen), extra_bytes, unit, cure, is_hint=True)


def _sends(step: Step) -> int:
    """Backward passes of a step that have sent gradients."""
    return sum(1 for one in step["passes"] if one["sends"])


FINDERS = (needless_syncs, undivided_losses, uneven_means, wrong_scale, lost_micro_batches)
FINDERS += (old_gradients, clipped_while_scaled, not_finite, summed_losses, divided_by_all)
FINDERS += (gradients_set_to_zero, loss_scale_left, uneven_windows)


def have_other_gradients(facts: list[Facts]) -> bool:
    """Whether ranks with the same inputs do something else with them than drop out other values."""
    if any(fact.drops_out for fact in facts):
        return False
    for steps in zip(*(fact.steps[0] for fact in facts if fact.steps)):
        first, *others = [step["local"] for step in steps]
        for other in others:
            if None not in (first, other) and not np.allclose(first, other, rtol=REST):
                return True
    return False


def why_apart(facts: list[Facts]) -> tuple[str, tuple[int, ...], str]:
    """(Reason, ranks that differ, cure) where weights that began equal no longer are."""
    cure = "let the last backward of each step run outside no_sync(), call the wrapped model"
    steps_of = {fact.rank: fact.taken for fact in facts}
    if len(set(steps_of.values())) > 1:
        most = max(steps_of.values())
        usual = sorted(steps_of.values())[len(facts) // 2] if len(facts) > 2 else most
        ranks = tuple(rank for rank, taken in steps_of.items() if taken != usual)
        others = tuple(rank for rank in steps_of if rank not in ranks)
        reason = (
            f": {ranks_text(ranks)} took {steps_of[ranks[0]]} optimizer steps, "
            f"{ranks_text(others)} {usual}"
        )
        return reason, ranks, "call step() on every rank, or leave a step out on all together"
    num_known = 0
    num_equal = 0
    for number, steps in enumerate(_steps(facts), start=1):
        if steps[0]["local"] is not None:
            num_known += 1
        if _averaging(steps) is not None:
            num_equal += 1
            continue
        last = [step["passes"][-1] for step in steps if step["passes"]]
        if last and all(one["bypasses"] for one in last):
            reason = ": model.module was called, whose gradients nobody averages"
            return reason, _ranks(facts), "call the wrapped model, model(inputs)"
        if last and not any(one["sends"] for one in last) and steps[0]["local"] is not None:
            reason = (
                ": the last backward pass of a step sent nothing, as one whose forward pass was "
                "inside no_sync(), or a second one of the same forward pass"
            )
            cure = "run the last forward and backward outside no_sync(), with one backward()"
            return reason, _ranks(facts), cure
        own = [fact.rank for fact, step in zip(facts, steps) if _is_own(step)]
        if own and len(own) < len(facts):
            reason = f": in step {number} {ranks_text(own)} stepped with a gradient of its own"
            return reason, tuple(own), cure
        if own:
            return "", _ranks(facts), cure
    if num_equal and num_equal == num_known:
        reason = ", though their gradients were the same"
        cure = "compare the optimizers (learning rate, schedule, state), and what else sets weights"
        return reason, _ranks(facts), cure
    return "", _ranks(facts), f"{cure}, and checkpoint with use_reentrant=False"


# ---- what is known of a step


def _steps(facts: list[Facts]) -> Iterator[list[Step]]:
    """Each step of each optimizer, as all ranks have noted it; none where a rank is missing."""
    if len(facts) < facts[0].ranks:
        return
    for of_ranks in zip(*(fact.steps for fact in facts)):
        yield from map(list, zip(*of_ranks))


def _averaging(steps: list[Step]) -> float | None:
    """a times the number of ranks; None if no one number explains what arrived."""
    locals_ = [step["local"] for step in steps]
    if None in locals_:
        return None
    total = np.sum(np.array(locals_), axis=0)
    factors = [_factor(np.array(step["arrived"]), total) for step in steps]
    known = [factor for factor in factors if factor is not None]
    if len(known) < len(steps) or not _is(min(known), max(known)):
        return None
    return float(np.mean(known)) * len(steps)


def _factor(new: np.ndarray, old: np.ndarray) -> float | None:
    """The number by which one gradient is a multiple of another; None if it is none."""
    if new.shape != old.shape or not (np.isfinite(new).all() and np.isfinite(old).all()):
        return None
    size = float(old @ old)
    if not size or not new.any():
        return None
    factor = float(new @ old) / size
    rest = np.linalg.norm(new - factor * old)
    return factor if rest <= REST * np.linalg.norm(new) else None


def _is_own(step: Step) -> bool:
    """Whether a rank stepped with what its own backward passes brought, and with nothing else."""
    if step["local"] is None:
        return False
    return _factor(np.array(step["arrived"]), np.array(step["local"])) is not None


def _totals(steps: list[Step]) -> list[_Total]:
    """T of each loss of a step that is a mean on all ranks, or a sum over a known number of values.

    None if a is not known.
    """
    averaging = _averaging(steps)
    if averaging is None:
        return []
    found = []
    for key, passes in _by_key(steps).items():
        losses = [one["loss"] for one in passes if one["loss"] is not None]
        counts = {_count(step, key) for step in steps}
        weights = _weights(losses)
        if len(losses) < len(passes) or not weights:
            continue
        divisors = [loss["divisor"] for loss in losses]
        found.append(
            _Total(
                # what was clipped may have been unscaled after that
                value=sum(weights) * averaging / len(steps) * steps[0]["scaled"],
                count=counts.pop() if len(counts) == 1 else 0,
                factor=_common(weights),
                averaging=averaging,
                divisor=_common(divisors),
                is_mean=losses[0]["kind"] == "mean",
                losses=losses,
                sources=[one["source"] for one in steps[0]["passes"] if one["key"] == key],
            )
        )
    return found


def _weights(losses: list[dict[str, Any]]) -> list[float]:
    """The factor in front of the mean of each loss; none if they are not all means.

    A sum is n times a mean. How many values a sum goes over is known where it is one of classes, or
    was divided by their number, its own or that of the whole step. (Else it may have been divided
    by the number of samples, each of many values.)
    """
    kinds = {loss["kind"] for loss in losses}
    if kinds == {"mean"}:
        return [loss["factor"] for loss in losses]
    if kinds != {"sum"}:
        return []
    of_all = sum(loss["count"] for loss in losses)
    for loss in losses:
        numbers = (loss["count"], of_all)
        is_known = loss["classes"] or any(_is(loss["divisor"], number) for number in numbers)
        if not is_known:
            return []
    return [loss["factor"] * loss["count"] for loss in losses]


def _count(step: Step, key: int) -> int:
    return sum(one["key"] == key for one in step["passes"])


def _is_one_batch(total: _Total) -> bool:
    """Whether several losses of one batch are added up: those of real and made images, of tasks."""
    if not all(total.sources):
        return False
    batches = {tuple(source[:-1]) for source in total.sources}
    memories = {source[-1] for source in total.sources}
    return len(batches) == 1 and batches != {()} and len(memories) > 1


def _by_key(steps: list[Step]) -> dict[int, list[dict[str, Any]]]:
    """The backward passes of a step that are micro-batches of one loss, of all ranks."""
    together: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for step in steps:
        for one in step["passes"]:
            together[one["key"]].append(one)
    return together


def _unevenness(steps: list[Step]) -> float:
    """How much more one value counts than another of the same loss, over all ranks in a step."""
    worst = 1.0
    for passes in _by_key(steps).values():
        losses = [one["loss"] for one in passes if one["loss"] is not None]
        per_value = []
        numerators = []
        for loss in losses:
            if loss["kind"] == "mean" and loss["count"]:
                per_value.append(loss["factor"] / loss["count"])
                numerators.append(loss["factor"])
            elif loss["kind"] != "mean" and loss["divisor"] > 0:  # by the number of values
                per_value.append(loss["factor"])
                numerators.append(loss["factor"] * loss["divisor"])
        # weights of their own, as where each loss is divided by its size
        if numerators and not _is(min(numerators), max(numerators)):
            continue
        if per_value and min(per_value) > 0:
            worst = max(worst, max(per_value) / min(per_value))
    return worst


def _is(value: float, number: float) -> bool:
    """Whether a measured number is the one."""
    return abs(value - number) <= CLOSE * abs(number)


def _common(values: list[float]) -> float:
    """The number that all are; 0 if they are not one."""
    return values[0] if values and _is(min(values), max(values)) else 0.0


def _ranks(facts: list[Facts]) -> tuple[int, ...]:
    return tuple(fact.rank for fact in facts)
