"""From the facts of all ranks to findings: pure functions, the same on every rank."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

from labcode.doctor import judge_gradient
from labcode.doctor.facts import Facts, Finding
from labcode.runtime.units import ranks_text

SLOW_FACTOR = 2.0
SLOW_STEPS = 6  # fewer say nothing on a busy machine
SLOW_LEAST_S = 0.01  # a step: less than that between two ranks is that machine's other work
SLOW_SHARE = 0.2  # of the others' step, below which nobody waits for it
TOLERANCE = 1e-6  # of sums of weights that should be equal bit for bit


def judge(facts: list[Facts]) -> list[Finding]:
    """All that the facts of all ranks show, at most one finding of a kind.

    Args:
        facts: Facts from all ranks, in rank order.
    """
    found: list[Finding] = []
    for finder in FINDERS:
        found.extend(finder(facts))
    return found


def stopped_calls(facts: list[Facts]) -> Iterator[Finding]:
    """A collective that not all ranks called, or not all alike."""
    said = [fact for fact in facts if fact.call]
    if said:
        name, what, cure = said[0].call
        ranks = tuple(said[0].differs or (fact.rank for fact in said))
        unit = "rank stopped" if len(said) == 1 else "ranks stopped"
        yield Finding(name, what, ranks, len(said), unit, cure)


def same_data(facts: list[Facts]) -> Iterator[Finding]:
    """Two ranks that were given the same inputs at every step."""
    facts_with: dict[tuple[int, ...], list[Facts]] = defaultdict(list)
    for fact in facts:
        if len(fact.inputs) >= 2:
            facts_with[tuple(fact.inputs)].append(fact)
    for inputs, alike in facts_with.items():
        ranks = [fact.rank for fact in alike]
        # ranks that share a sequence get it whole, and each trains on its part
        if len(ranks) > 1 and not judge_gradient.have_other_gradients(alike):
            what = "these ranks were given the same inputs at every forward pass"
            cure = "give the DataLoader a DistributedSampler"
            yield Finding("same data", what, tuple(ranks), len(inputs), "equal batches", cure)
            return


def foreign_data(facts: list[Facts]) -> Iterator[Finding]:
    """Inputs on another device than the weights."""
    seen = [fact for fact in facts if fact.foreign_inputs]
    if seen:
        what = "inputs are on another device than the weights"
        count = sum(fact.foreign_inputs for fact in seen)
        cure = "move each batch to the rank's device"
        yield Finding("data elsewhere", what, _ranks(seen), count, "forward passes", cure)


def epoch_forgotten(facts: list[Facts]) -> Iterator[Finding]:
    """A shuffling sampler that gives every epoch in the same order."""
    seen = []
    most = 0
    for fact in facts:
        repeated = sum(one == other for one, other in zip(fact.epochs, fact.epochs[1:]))
        if repeated:
            seen.append(fact)
            most = max(most, repeated + 1)
    if seen:
        what = "every epoch has the same order"
        cure = "call sampler.set_epoch(epoch) before each epoch"
        yield Finding("set_epoch forgotten", what, _ranks(seen), most, "equal epochs", cure)


def samplers_disagree(facts: list[Facts]) -> Iterator[Finding]:
    """Samplers that shuffle in other orders, so that some samples are in several shares."""
    passes = zip(*(zip(fact.seeds, fact.epochs) for fact in facts))
    for number, orders in enumerate(passes, start=1):
        usual, count = Counter(orders).most_common(1)[0]
        if count == len(facts):
            continue
        others = [place for place, order in enumerate(orders) if order != usual]
        seed, epoch = orders[others[0]]
        ranks = tuple(facts[place].rank for place in others)
        what = (
            f"in pass {number} the sampler of {ranks_text(ranks)} shuffles with seed {seed} and "
            f"epoch {epoch}, that of the others with seed {usual[0]} and epoch {usual[1]}: "
            "their shares overlap"
        )
        cure = "the same seed and set_epoch(epoch) on all ranks"
        yield Finding("samplers disagree", what, ranks, len(others), "samplers", cure)
        return


def different_start(facts: list[Facts]) -> Iterator[Finding]:
    """Weights that differ between ranks before the first forward pass."""
    gap = _spread([fact.start for fact in facts])
    if gap > TOLERANCE:
        what = "the weights differ between ranks before the first step"
        cure = "change weights before wrapping, which gives all ranks those of rank 0"
        yield Finding("different weights", what, _ranks(facts), gap, "relative difference", cure)


def drifted_apart(facts: list[Facts]) -> Iterator[Finding]:
    """Weights that began equal and differ at the end, where nothing above explains it."""
    explained = any(fact.call or fact.failed for fact in facts)
    # backward sent only a part
    explained = explained or any(changed_after_wrapping(facts)) or any(missing_search(facts))
    began_equal = _spread([fact.start for fact in facts]) <= TOLERANCE
    gap = _spread([fact.end for fact in facts])
    if began_equal and not explained and gap > TOLERANCE:
        reason, ranks, cure = judge_gradient.why_apart(facts)
        what = f"the weights began equal on all ranks and no longer are{reason}"
        yield Finding("weights drift", what, ranks, gap, "relative difference", cure)


def counted_twice(facts: list[Facts]) -> Iterator[Finding]:
    """Samples that a sampler gives a second time, in results that ranks add up."""
    if len(facts) < facts[0].ranks:
        return
    for passes in zip(*(fact.evaluated for fact in facts)):
        sizes = {size for size, *_ in passes}
        drawn = [one[1] for one in passes]
        are_shares = all(one[2] == len(facts) for one in passes) and max(drawn) < max(sizes)
        is_combined = all(one[3] for one in passes)
        may_be_exact = any(one[4] for one in passes)
        twice = sum(drawn) - max(sizes)
        if len(sizes) == 1 and are_shares and is_combined and not may_be_exact and twice > 0:
            samples = "1 sample counts" if twice == 1 else f"{twice} samples count"
            what = (
                f"in the evaluation {samples} twice: the ranks drew {sum(drawn)} samples, the data "
                f"set has {max(sizes)}, and DistributedSampler fills up the last shares"
            )
            cure = (
                "evaluate on Subset(data, range(rank, len(data), world_size)), or gather the "
                f"results and keep the first {max(sizes)}"
            )
            yield Finding("counted twice", what, _ranks(facts), twice, "samples", cure)
            return


def other_optimizer(facts: list[Facts]) -> Iterator[Finding]:
    """An optimizer that was built from other parameters."""
    seen = []
    for fact in facts:
        if fact.foreign and fact.taken and fact.start is not None and fact.start == fact.end:
            seen.append(fact)
    cure = "build the optimizer last, from the parameters of the finished model on its device"
    if seen:
        what = "no parameter of the optimizer belongs to the model: its steps changed no weight"
        count = max(fact.taken for fact in seen)
        yield Finding("other parameters", what, _ranks(seen), count, "steps", cure)
        return
    seen = [fact for fact in facts if fact.forgotten]
    if seen:
        what = "the optimizer holds old copies of parameters that were replaced; the new ones stay"
        count = max(fact.forgotten for fact in seen)
        yield Finding("other parameters", what, _ranks(seen), count, "parameters", cure)


def reducer_errors(facts: list[Facts]) -> Iterator[Finding]:
    """An error of DDP itself that nothing above explains."""
    seen = [fact for fact in facts if fact.reducer]
    known = [*changed_after_wrapping(facts), *missing_search(facts), *stopped_calls(facts)]
    if seen and not known:
        name, what, cure = seen[0].reducer
        yield Finding(name, what, _ranks(seen), len(seen), "ranks with the error", cure)


def statistics_diverge(facts: list[Facts]) -> Iterator[Finding]:
    """Running statistics of BatchNorm that each rank keeps for itself."""
    num_noted = min(len(fact.statistics) for fact in facts)  # a rank may have fewer steps
    if not num_noted:
        return
    gap = _spread([fact.statistics[num_noted - 1] for fact in facts])
    if gap > TOLERANCE:
        what = "each rank keeps other running statistics of BatchNorm"
        cure = (
            "leave forward_sync_buffers on (broadcast_buffers before PyTorch 2.13), or convert to "
            "SyncBatchNorm on GPUs"
        )
        yield Finding("BatchNorm diverges", what, _ranks(facts), gap, "relative difference", cure)


def changed_after_wrapping(facts: list[Facts]) -> Iterator[Finding]:
    """Parameters that DDP does not know, or knows elsewhere."""
    seen = [fact for fact in facts if fact.unknown or fact.moved or fact.unfrozen]
    if seen:
        count = max(fact.unknown + fact.moved for fact in seen)
        change = "moved or replaced" if count else "unfrozen"
        what = f"parameters were {change} after wrapping; nobody averages their gradients"
        count = count or max(fact.unfrozen for fact in seen)
        cure = "finish the model and move it to its device, then wrap it"
        yield Finding("changed after wrapping", what, _ranks(seen), count, "parameters", cure)


def needless_search(facts: list[Facts]) -> Iterator[Finding]:
    """A search for unused parameters where all are used."""
    steps = min(len(fact.syncs) for fact in facts)
    unused = sum(fact.unused for fact in facts)
    if steps >= 2 and not unused and all(fact.finds_unused for fact in facts):
        what = "DDP searches the graph for unused parameters at every step, and all are used"
        cure = "leave out find_unused_parameters=True"
        unit = "unused parameters"
        yield Finding("search unneeded", what, _ranks(facts), unused, unit, cure, is_hint=True)


def missing_search(facts: list[Facts]) -> Iterator[Finding]:
    """Parameters without a gradient under a DDP that waits for all."""
    seen = [fact for fact in facts if fact.finds_unused is False and fact.unused]
    if seen:
        what = "some parameters took no part in a step, and DDP waits for their gradients"
        if len(seen) < seen[0].ranks:
            names = ", ".join(seen[0].unused_names)
            who = "on this rank" if len(seen) == 1 else "on these ranks"
            what = f"{names} took no part in a step {who}, and the others wait for the gradient"
        count = max(fact.unused for fact in seen)
        cure = "use every parameter in the loss, or set find_unused_parameters=True"
        yield Finding("unused parameters", what, _ranks(seen), count, "parameters", cure)


def crowded_gpu(facts: list[Facts]) -> Iterator[Finding]:
    """Several ranks on one GPU."""
    ranks_on: dict[str, list[int]] = defaultdict(list)
    for fact in facts:
        if "GPU" in fact.device:
            ranks_on[fact.device].append(fact.rank)
    for ranks in ranks_on.values():
        if len(ranks) > 1:
            what = "these ranks share one GPU"
            cure = "torch.cuda.set_device(LOCAL_RANK) first of all"
            yield Finding("one GPU for all", what, tuple(ranks), len(ranks), "ranks", cure)


def saved_by_all(facts: list[Facts]) -> Iterator[Finding]:
    """One file that several ranks write."""
    ranks_of: dict[str, list[int]] = defaultdict(list)
    for fact in facts:
        for path in set(fact.saved):
            ranks_of[path].append(fact.rank)
    crowded = [ranks for ranks in ranks_of.values() if len(ranks) > 1]
    if crowded:
        what = "these ranks write the same checkpoint at the same time"
        cure = "save on rank 0 only"
        unit = "file" if len(crowded) == 1 else "files"
        yield Finding("saved by all", what, tuple(crowded[0]), len(crowded), unit, cure)


def same_draws(facts: list[Facts]) -> Iterator[Finding]:
    """Augmentation that draws the same random numbers in several workers, or on several ranks."""
    workers_from: dict[int, set[tuple[int, int]]] = defaultdict(set)
    for rank, worker, states in _drawn(facts):
        for state in states:
            workers_from[state].add((rank, worker))
    num_drawn = 0
    num_shared = 0
    ranks: set[int] = set()
    for rank, _, states in _drawn(facts):
        num_drawn += 1
        if any(len(workers_from[state]) > 1 for state in states):
            num_shared += 1
            ranks.add(rank)
    if num_shared:
        what = "batches are augmented with the same random numbers as those of another worker"
        unit = f"of {num_drawn} batches that drew"
        cure = "DataLoader(generator=torch.Generator().manual_seed(seed + rank)), and draw from "
        cure += "the global generators, which it seeds; no fixed seed in worker_init_fn"
        yield Finding("same random numbers", what, tuple(sorted(ranks)), num_shared, unit, cure)


def slow_rank(facts: list[Facts]) -> Iterator[Finding]:
    """A rank whose own work takes longer; the others' waiting does not count.

    Of each rank the phase that costs most is named.
    """
    if len(facts) < 2:
        return
    num_steps = min(min(map(len, fact.seconds.values()), default=0) for fact in facts)
    if num_steps < SLOW_STEPS:
        return
    for place, fact in enumerate(facts):
        others = facts[:place] + facts[place + 1 :]
        worst = max((_lateness(fact, others, phase) for phase in fact.seconds), default=_IN_TIME)
        if worst.excess_s > 0:
            what = (
                f"it spends {worst.own_s * 1e3:.0f} ms of a step in {worst.phase}, "
                f"the others {worst.others_s * 1e3:.0f} ms"
            )
            unit = f"times the others' time in {worst.phase}"
            ratio = worst.own_s / max(worst.others_s, 1e-4)
            yield Finding("slow rank", what, (fact.rank,), ratio, unit, SLOW_CURES[worst.phase])


SLOW_CURES: dict[str, str] = dict.fromkeys(
    ("forward", "backward", "optimizer"),
    "look at that node: clock, other jobs, threads; or give it less work",
)
SLOW_CURES["data loading"] = (
    "look at how that rank reads: its disk, its loader's workers, other jobs on its cores"
)


class _Lateness(NamedTuple):
    """How much longer a rank takes in a phase; compared by the first field."""

    excess_s: float
    phase: str
    own_s: float
    others_s: float


_IN_TIME = _Lateness(0.0, "", 0.0, 0.0)


def _lateness(fact: Facts, others: list[Facts], phase: str) -> _Lateness:
    """Lateness of a rank in a phase; `_IN_TIME` if nobody waits for it."""
    own_s = median(fact.seconds[phase])
    others_s = median(median(other.seconds[phase]) for other in others)
    step_s = median(_step_s(other) for other in others)
    least_s = max(SLOW_LEAST_S, SLOW_SHARE * step_s)
    slow_s = max(SLOW_FACTOR * others_s, others_s + least_s)
    num_slow = sum(seconds > slow_s for seconds in fact.seconds[phase])
    if own_s > slow_s and num_slow >= 0.75 * len(fact.seconds[phase]):
        return _Lateness(own_s - others_s, phase, own_s, others_s)
    return _IN_TIME


def _step_s(fact: Facts) -> float:
    """What a rank itself does in a step."""
    return sum(map(median, fact.seconds.values()))


FINDERS = (stopped_calls, same_data, foreign_data, epoch_forgotten, different_start, drifted_apart)
FINDERS += (samplers_disagree,)
FINDERS += (statistics_diverge, changed_after_wrapping, *judge_gradient.FINDERS)
FINDERS += (needless_search, missing_search, crowded_gpu, saved_by_all, slow_rank, same_draws)
FINDERS += (counted_twice, other_optimizer, reducer_errors)


def _ranks(facts: list[Facts]) -> tuple[int, ...]:
    return tuple(fact.rank for fact in facts)


def _spread(values: list[float | None]) -> float:
    """The largest relative difference; 0 where somebody has no value."""
    known = [value for value in values if value is not None]
    if len(known) < max(2, len(values)):
        return 0.0
    largest = max(abs(value) for value in known)
    return (max(known) - min(known)) / largest if largest else 0.0


def _drawn(facts: list[Facts]) -> Iterator[tuple[int, int, list[int]]]:
    """(rank, worker, states drawn from) of each batch that drew."""
    for fact in facts:
        for worker, batches in enumerate(fact.draws):
            for states in batches:
                yield fact.rank, worker, states
