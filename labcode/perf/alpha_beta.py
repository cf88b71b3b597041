"""The alpha-beta model: how long communication takes, from the size of a message and the ranks.

    time of one message of n bytes = alpha + n / beta

alpha [s] is what a message costs before its first byte arrives, beta [bytes/s] the speed of the
link. A collective is a number of messages one after the other, and a number of bytes through each
rank's link. With p ranks and n bytes in the whole tensor, which every rank holds before the
collective (reduce) or after it (gather):

    send                   1 message      n bytes
    ring all-reduce        2 (p-1)        2 (p-1)/p n
    ring all-gather        p-1            (p-1)/p n         the same: reduce-scatter, all-to-all

The model ignores contention: two messages that cross one wire, or wait for one core, take longer
than it says.

Source: Hockney 1994 (doi 10.1016/S0167-8191(06)80021-9) for alpha and beta; Thakur, Rabenseifner,
    Gropp 2005 (doi 10.1177/1094342005051521) for the collectives; Patarasuk, Yuan 2009
    (doi 10.1016/j.jpdc.2008.09.002) for the ring.
Held by: tests/unit/test_alpha_beta.py; the bytes by
    tests/ranks/test_ring.py::test_a_ring_sends_the_bytes_of_the_formula
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

# How often the whole tensor goes round the ring. In one round a rank sends p-1 messages, each of
# 1/p of the tensor. An all-reduce is a reduce-scatter and an all-gather: two rounds.
_ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}
COLLECTIVES = ("send", *_ROUNDS)


@dataclass(frozen=True)
class Link:
    """What connects the ranks.

    Args:
        alpha_s: Cost of an empty message, in seconds.
        beta_bytes_per_s: Speed of a very long message, in bytes per second; infinity if size does
            not matter.
    """

    alpha_s: float
    beta_bytes_per_s: float


def messages(collective: str, p: int) -> int:
    """Messages that each of `p` ranks sends one after the other; all but "send" on a ring.

    Raises:
        ValueError: A collective that the model does not know, or no rank.
    """
    _check(collective, p)
    if collective == "send":
        return 1
    return _ROUNDS[collective] * (p - 1)


def bytes_sent(collective: str, p: int, num_bytes: float) -> float:
    """Bytes that each of `p` ranks sends for a tensor of `num_bytes`; it receives as many.

    Raises:
        ValueError: A collective that the model does not know, or no rank.
    """
    _check(collective, p)
    if collective == "send":
        return num_bytes
    return _ROUNDS[collective] * (p - 1) / p * num_bytes


def time_s(collective: str, p: int, num_bytes: float, link: Link) -> float:
    """Predicted seconds of a collective.

        messages * alpha + bytes_sent / beta

    Args:
        collective: send, all_reduce, all_gather, reduce_scatter or all_to_all.
        p: Number of ranks.
        num_bytes: The whole tensor, see the top of the file.
        link: Link between any two ranks.
    """
    latency_s = messages(collective, p) * link.alpha_s
    return latency_s + bytes_sent(collective, p, num_bytes) / link.beta_bytes_per_s


def balance_bytes(collective: str, p: int, link: Link) -> float:
    """The tensor size at which latency and bandwidth cost the same.

        p * alpha * beta        for a ring all-reduce

    Half of the link's speed is reached there (Hockney's n_1/2). One rank sends nothing: 0.
    """
    share = bytes_sent(collective, p, 1)
    if share == 0:
        return 0.0
    return messages(collective, p) * link.alpha_s * link.beta_bytes_per_s / share


def fit(collective: str, p: int, sizes_bytes: Sequence[float], times_s: Sequence[float]) -> Link:
    """alpha and beta that explain measured times best; two points are enough.

        minimise  sum over points of ((messages * alpha + bytes / beta) / time - 1)^2

    Relative errors, or the largest message would decide alone. Neither alpha nor 1/beta comes out
    negative.

    Args:
        collective: What was timed.
        p: Number of ranks, at least 2 unless for "send".
        sizes_bytes: Tensor sizes, at least two different ones.
        times_s: Seconds of each.

    Raises:
        ValueError: Too few different sizes, lists of two lengths, a time that is not positive, or
            one rank.
    """
    num_different = len(set(sizes_bytes))
    if len(sizes_bytes) != len(times_s) or num_different < 2 or min(times_s) <= 0:
        raise ValueError(
            f"{len(times_s)} times for {len(sizes_bytes)} sizes, {num_different} of them "
            "different: alpha and beta need two or more sizes, with one time above 0 each"
        )
    if bytes_sent(collective, p, 1) == 0:
        raise ValueError(f"{collective} on p={p} sends nothing: measure on 2 ranks or more")
    # Least squares A [alpha, 1/beta] = 1 with the columns a and b of A, each row divided by its
    # measured time. Two unknowns: the normal equations are solved by Cramer's rule.
    a = []
    b = []
    for size, time in zip(sizes_bytes, times_s, strict=True):
        a.append(messages(collective, p) / time)
        b.append(bytes_sent(collective, p, size) / time)
    aa = _dot(a, a)
    ab = _dot(a, b)
    bb = _dot(b, b)
    a1 = math.fsum(a)
    b1 = math.fsum(b)
    determinant = aa * bb - ab * ab
    alpha = (a1 * bb - b1 * ab) / determinant
    inverse_beta = (b1 * aa - a1 * ab) / determinant
    # Noise can push one of the two below zero. The best fit then has it at zero.
    if alpha < 0:
        alpha = 0.0
        inverse_beta = b1 / bb
    elif inverse_beta <= 0:
        alpha = a1 / aa
        inverse_beta = 0.0
    beta = 1 / inverse_beta if inverse_beta else math.inf
    return Link(alpha, beta)


def _dot(x: Sequence[float], y: Sequence[float]) -> float:
    return math.fsum(i * j for i, j in zip(x, y, strict=True))


def _check(collective: str, p: int) -> None:
    if p < 1:
        raise ValueError(f"p={p}: a collective needs at least 1 rank")
    if collective not in COLLECTIVES:
        raise ValueError(f"no formula for {collective!r}: choose one of {', '.join(COLLECTIVES)}")
