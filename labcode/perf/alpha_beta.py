"""How long communication takes, from the number of ranks and the size of a message: the alpha-beta model.

    time of one message of n bytes = alpha + n / beta

alpha [s] is what a message costs before its first byte arrives, beta [bytes/s] the speed of the link. A collective is a
number of messages one after the other and a number of bytes through each rank's link; p is the number of ranks, n the bytes
of the whole tensor, which every rank holds before (reduce) or after (gather) the collective:

    send                   1 message      n bytes
    ring all-reduce        2 (p-1)        2 (p-1)/p n
    ring all-gather        p-1            (p-1)/p n         reduce-scatter and all-to-all the same

The model knows no sharing: two messages that cross one wire, or wait for one core, take longer than it says.

Source: Hockney 1994 (doi 10.1016/S0167-8191(06)80021-9) for alpha and beta; Thakur, Rabenseifner, Gropp 2005 (doi
10.1177/1094342005051521) for the collectives; Patarasuk, Yuan 2009 (doi 10.1016/j.jpdc.2008.09.002) for the ring.
Held by: tests/unit/test_perf_comm.py; the bytes by tests/ranks/test_ring.py::test_a_ring_sends_the_bytes_of_the_formula
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

# messages that a rank sends one after the other, and the bytes of all of them as a share of n
_ALGORITHMS = {
    "send": (lambda p: 1, lambda p: 1.0),
    "all_reduce": (lambda p: 2 * (p - 1), lambda p: 2 * (p - 1) / p),
    "all_gather": (lambda p: p - 1, lambda p: (p - 1) / p),
    "reduce_scatter": (lambda p: p - 1, lambda p: (p - 1) / p),
    "all_to_all": (lambda p: p - 1, lambda p: (p - 1) / p),
}


@dataclass(frozen=True)
class Link:
    """What connects the ranks.

    Args:
        alpha_s: Cost of a message of no bytes, seconds.
        beta_bytes_per_s: Bytes per second of a message without end; infinity if size does not matter.
    """

    alpha_s: float
    beta_bytes_per_s: float


def messages(collective: str, p: int) -> int:
    """Messages that each of `p` ranks sends one after the other; ring algorithms, except for "send".

    Raises:
        ValueError: A collective that the model does not know, or no rank.
    """
    return _algorithm(collective, p)[0](p)


def bytes_sent(collective: str, p: int, num_bytes: float) -> float:
    """Bytes that each of `p` ranks sends for a tensor of `num_bytes`; it receives as many."""
    return _algorithm(collective, p)[1](p) * num_bytes


def time_s(collective: str, p: int, num_bytes: float, link: Link) -> float:
    """Predicted seconds of a collective.

        messages * alpha + bytes_sent / beta

    Args:
        collective: send, all_reduce, all_gather, reduce_scatter or all_to_all.
        p: Number of ranks.
        num_bytes: The whole tensor, see the top of the file.
        link: Between any two ranks.
    """
    return (
        messages(collective, p) * link.alpha_s
        + bytes_sent(collective, p, num_bytes) / link.beta_bytes_per_s
    )


def balance_bytes(collective: str, p: int, link: Link) -> float:
    """The tensor size at which latency and bandwidth cost the same; for a ring all-reduce `p * alpha * beta`.

    Half of the link's speed is reached there (Hockney's n_1/2). One rank sends nothing: 0.
    """
    share = bytes_sent(collective, p, 1)
    return messages(collective, p) * link.alpha_s * link.beta_bytes_per_s / share if share else 0.0


def bus_bandwidth(collective: str, p: int, num_bytes: float, measured_s: float) -> float:
    """Bytes per second that crossed each rank's link, to hold against what the link can do.

        bytes_sent / seconds

    Source: "busbw" in github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md.
    """
    return bytes_sent(collective, p, num_bytes) / measured_s


def fit(collective: str, p: int, sizes_bytes: Sequence[float], times_s: Sequence[float]) -> Link:
    """alpha and beta that explain measured times best; two points are enough.

        minimise  sum over points of ((messages * alpha + bytes / beta) / time - 1)^2

    Relative errors, or the largest message would decide alone. Neither alpha nor 1/beta comes out negative.

    Args:
        collective: What was timed.
        p: Number of ranks, at least 2 unless for "send".
        sizes_bytes: Tensor sizes, at least two different ones.
        times_s: Seconds of each.

    Raises:
        ValueError: Too few different sizes, lists of two lengths, a time that is not positive, or one rank.
    """
    if len(sizes_bytes) != len(times_s) or len(set(sizes_bytes)) < 2 or min(times_s) <= 0:
        raise ValueError(
            f"{len(times_s)} times for {len(sizes_bytes)} sizes, {len(set(sizes_bytes))} of them different: alpha and beta "
            f"need two or more sizes, with one time above 0 each"
        )
    if bytes_sent(collective, p, 1) == 0:
        raise ValueError(f"{collective} on p={p} sends nothing: measure on 2 ranks or more")
    # columns of the least-squares problem A [alpha, 1/beta] = 1, each row divided by its time
    a = [messages(collective, p) / time for time in times_s]
    b = [bytes_sent(collective, p, size) / time for size, time in zip(sizes_bytes, times_s)]
    aa, ab, bb, a1, b1 = _dot(a, a), _dot(a, b), _dot(b, b), math.fsum(a), math.fsum(b)
    det = aa * bb - ab * ab
    alpha, slowness = (a1 * bb - b1 * ab) / det, (b1 * aa - a1 * ab) / det
    if alpha < 0:
        alpha, slowness = 0.0, b1 / bb  # the best with alpha = 0
    elif slowness <= 0:
        alpha, slowness = a1 / aa, 0.0
    return Link(alpha, 1 / slowness if slowness else math.inf)


def _dot(x, y):
    return math.fsum(i * j for i, j in zip(x, y))


def _algorithm(collective, p):
    if p < 1:
        raise ValueError(f"p={p}: a collective needs at least 1 rank")
    try:
        return _ALGORITHMS[collective]
    except KeyError:
        raise ValueError(
            f"no formula for {collective!r}: choose one of {', '.join(_ALGORITHMS)}"
        ) from None
