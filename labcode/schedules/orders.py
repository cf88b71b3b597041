"""The four schedules: in which order one rank runs the forwards and backwards of its stages.

Each function below gives the order of one rank. In the comments p is the number of ranks, m the
number of micro-batches, v the number of stages on each rank (1 except for "interleaved") and r the
rank.
"""

from collections.abc import Callable, Sequence

from labcode.schedules.actions import Action, Actions


def _alternate(
    forwards: Sequence[Action], backwards: Sequence[Action], warmup: int
) -> list[Action]:
    """First `warmup` forwards, then forward and backward in turn, then the backwards left."""
    # Forward first in each pair: on the last rank, whose warm-up is 0, the backward needs it.
    order = list(forwards[:warmup])
    # zip ends with the shorter list, the forwards: `warmup` backwards have no forward left
    for forward, backward in zip(forwards[warmup:], backwards):
        order.append(forward)
        order.append(backward)
    num_pairs = len(forwards) - warmup
    order.extend(backwards[num_pairs:])
    return order


def _gpipe(rank: int, num_ranks: int, stages_per_rank: int, num_microbatches: int) -> list[Action]:
    """All forwards, then all backwards."""
    forwards = [Action("F", rank, i) for i in range(num_microbatches)]
    backwards = [Action("B", rank, i) for i in range(num_microbatches)]
    return forwards + backwards


def _1f1b(rank: int, num_ranks: int, stages_per_rank: int, num_microbatches: int) -> list[Action]:
    """One forward, one backward, after as many forwards as there are stages behind this one.

    Stage r has p-1-r stages behind it. When it has run that many forwards, the first micro-batch is
    at the last stage, which turns it round at once. From then on each forward that adds activations
    is followed by a backward that frees some, so a rank never keeps more than p-r micro-batches;
    gpipe keeps all m.
    """
    forwards = [Action("F", rank, i) for i in range(num_microbatches)]
    backwards = [Action("B", rank, i) for i in range(num_microbatches)]
    # Simulated with p = 4, m = 8 and a backward of two forwards, this takes 33 forwards. One less
    # on each rank takes 54; one more takes 33 too, and keeps activations for longer.
    warmup = min(num_ranks - 1 - rank, num_microbatches)
    return _alternate(forwards, backwards, warmup)


def _interleaved(
    rank: int, num_ranks: int, stages_per_rank: int, num_microbatches: int
) -> list[Action]:
    """1F1B over v stages on each rank: p micro-batches through one stage, then through the next.

    Rank r has the stages r, p + r, 2p + r, ..., its chunks 0 to v-1. When p micro-batches have
    entered chunk 0, the first of them has passed all p ranks and is back for chunk 1, so a rank
    need not wait between the chunks of one group.
    """
    forwards = []
    backwards = []
    for first in range(0, num_microbatches, num_ranks):
        for chunk in range(stages_per_rank):
            # the backward runs through the same chunks from the last one to the first
            forward_stage = chunk * num_ranks + rank
            backward_stage = (stages_per_rank - 1 - chunk) * num_ranks + rank
            for i in range(first, first + num_ranks):
                forwards.append(Action("F", forward_stage, i))
                backwards.append(Action("B", backward_stage, i))
    # The first backward is that of the last chunk. Before it there are (v-1) p forwards of the
    # chunks below, and 2 (p-1-r) more until micro-batch 0 has gone from here to rank p-1 and its
    # gradient has come back: one for each hop. The price of the smaller bubble is memory: with
    # p = 4 and v = 2 rank 0 keeps up to 11 forwards of half a rank's layers, 1F1B 4 of all of them.
    warmup = (stages_per_rank - 1) * num_ranks + 2 * (num_ranks - 1 - rank)
    return _alternate(forwards, backwards, min(warmup, len(forwards)))


def _zero_bubble(
    rank: int, num_ranks: int, stages_per_rank: int, num_microbatches: int
) -> list[Action]:
    """1F1B with I in place of B; each W runs r micro-batches late, to fill the gaps at the end.

    No action waits for a W, so it can run at any time. At the end of 1F1B rank r waits for r
    gradients to pass it on their way to stage 0; the r weight gradients that it put off fill just
    these gaps. The price: a micro-batch's activations are kept until its W, so that every rank
    keeps p of them, as only rank 0 does with 1F1B.
    """
    # One more than in `_1f1b`: there the steady phase begins with a forward, the loop below with I.
    warmup = min(num_ranks - rank, num_microbatches)
    order = [Action("F", rank, i) for i in range(warmup)]
    for i in range(num_microbatches):
        # I first, since the rank before waits for it.
        order.append(Action("I", rank, i))
        late = i - rank
        if late >= 0:
            order.append(Action("W", rank, late))
        ahead = i + num_ranks - rank
        if ahead < num_microbatches:
            order.append(Action("F", rank, ahead))
    first_left = max(num_microbatches - rank, 0)
    for i in range(first_left, num_microbatches):
        order.append(Action("W", rank, i))
    return order


_ORDERS: dict[str, Callable[[int, int, int, int], list[Action]]] = {
    "gpipe": _gpipe,
    "1f1b": _1f1b,
    "interleaved": _interleaved,
    "zero_bubble": _zero_bubble,
}
NAMES = tuple(_ORDERS)


def schedule(
    name: str, num_stages: int, num_microbatches: int, num_ranks: int | None = None
) -> Actions:
    """What every rank computes, in order. Each rank makes the whole table, so none has to ask.

    Stage s is on rank s % num_ranks.

    Args:
        name: "gpipe", "1f1b", "interleaved" or "zero_bubble" (ZB-H1: 1F1B's memory, about a third
            of its bubble).
        num_stages: The number of ranks; for "interleaved" any multiple, v stages on each rank.
        num_microbatches: Any number; for "interleaved" a multiple of num_ranks.
        num_ranks: Ranks of the pipeline; None for as many as stages.

    Raises:
        ValueError: An unknown name, or numbers that do not fit each other.

    Source: Huang et al. 2019 (arXiv:1811.06965) for gpipe; Narayanan et al. 2021
        (arXiv:2104.04473), section 2.2, for 1f1b and interleaved; Qi et al. 2023
        (arXiv:2401.10241), section 2.1, for zero_bubble.
    Held by: tests/unit/test_schedules.py::test_the_orders_are_those_of_pytorch; zero_bubble by its
        bubble and its peak, in tests/unit/test_perf_pipeline.py.
    """
    if num_ranks is None:
        num_ranks = num_stages
    _check_sizes(name, num_stages, num_microbatches, num_ranks)
    stages_per_rank = num_stages // num_ranks
    order_of = _ORDERS[name]
    actions = {}
    for rank in range(num_ranks):
        actions[rank] = order_of(rank, num_ranks, stages_per_rank, num_microbatches)
    return actions


def _check_sizes(name: str, num_stages: int, num_microbatches: int, num_ranks: int) -> None:
    if name not in _ORDERS:
        raise ValueError(f"there is no schedule {name!r}: choose one of {', '.join(NAMES)}")
    counts = {
        "num_stages": num_stages,
        "num_microbatches": num_microbatches,
        "num_ranks": num_ranks,
    }
    for what, count in counts.items():
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"{what}={count!r}: a pipeline needs a whole number, at least 1")
    if num_stages % num_ranks:
        raise ValueError(
            f"num_stages={num_stages} is not a multiple of num_ranks={num_ranks}: "
            "change one of them"
        )
    if name != "interleaved" and num_stages != num_ranks:
        raise ValueError(
            f"{name} has one stage per rank, not num_stages={num_stages} on "
            f"num_ranks={num_ranks}: use interleaved"
        )
    if name == "interleaved" and num_microbatches % num_ranks:
        raise ValueError(
            f"interleaved needs num_microbatches={num_microbatches} to be a multiple of "
            f"num_ranks={num_ranks}"
        )
