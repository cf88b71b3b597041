"""The alpha-beta model: values by hand, ring identities, and a fit that finds the link again."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labcode.perf import alpha_beta
from labcode.perf.alpha_beta import Link

LINK = Link(alpha_s=1e-4, beta_bytes_per_s=1e9)
RINGS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@pytest.mark.parametrize(
    ("collective", "p", "steps", "sent", "seconds"),
    [
        ("send", 2, 1, 4e6, 1e-4 + 4e-3),
        ("all_reduce", 4, 6, 6e6, 6e-4 + 6e-3),
        ("all_gather", 4, 3, 3e6, 3e-4 + 3e-3),
        ("reduce_scatter", 4, 3, 3e6, 3e-4 + 3e-3),
        ("all_to_all", 8, 7, 3.5e6, 7e-4 + 3.5e-3),
        ("all_reduce", 1, 0, 0, 0),
    ],
)
def test_values_computed_by_hand(collective, p, steps, sent, seconds):
    assert alpha_beta.messages(collective, p) == steps
    assert alpha_beta.bytes_sent(collective, p, 4e6) == pytest.approx(sent)
    assert alpha_beta.time_s(collective, p, 4e6, LINK) == pytest.approx(seconds)


@given(p=st.integers(1, 4096), n=st.floats(0, 1e12))
def test_all_reduce_is_a_reduce_scatter_and_an_all_gather(p, n):
    both = alpha_beta.time_s("reduce_scatter", p, n, LINK) + alpha_beta.time_s(
        "all_gather", p, n, LINK
    )
    assert alpha_beta.time_s("all_reduce", p, n, LINK) == pytest.approx(both)
    assert alpha_beta.bytes_sent("all_reduce", p, n) <= 2 * n


def test_balance_is_where_latency_and_bandwidth_cost_the_same():
    for collective in RINGS:
        n = alpha_beta.balance_bytes(collective, 4, LINK)
        latency = alpha_beta.messages(collective, 4) * LINK.alpha_s
        assert alpha_beta.time_s(collective, 4, n, LINK) == pytest.approx(2 * latency)
        bytes_per_s = alpha_beta.bytes_sent(collective, 4, n) / (2 * latency)
        assert bytes_per_s == pytest.approx(LINK.beta_bytes_per_s / 2)
    assert alpha_beta.balance_bytes("all_reduce", 4, LINK) == pytest.approx(4 * 1e-4 * 1e9)
    assert alpha_beta.balance_bytes("all_reduce", 1, LINK) == 0


def test_the_bytes_of_a_published_run():
    """8 A100 over NVLink: 1 GiB in 8203.9 us is printed as a bus bandwidth of 229.04 GB/s, which
    NVIDIA defines as the bytes sent by a rank per second (stas00/ml-engineering, network/README.md;
    NVIDIA/nccl-tests, doc/PERFORMANCE.md).
    """
    bytes_per_s = alpha_beta.bytes_sent("all_reduce", 8, 2**30) / 8203.9e-6
    assert bytes_per_s == pytest.approx(229.04e9, rel=1e-3)


@given(
    alpha=st.floats(1e-7, 1e-2),
    beta=st.floats(1e6, 1e12),
    p=st.integers(2, 64),
    collective=st.sampled_from(("send", *RINGS)),
)
def test_a_fit_finds_back_the_link(alpha, beta, p, collective):
    link = Link(alpha, beta)
    middle = alpha_beta.balance_bytes(collective, p, link)
    for sizes in ([middle / 100, middle * 100], [middle / 50, middle, 3 * middle, 70 * middle]):
        found = alpha_beta.fit(
            collective, p, sizes, [alpha_beta.time_s(collective, p, n, link) for n in sizes]
        )
        assert found.alpha_s == pytest.approx(alpha, rel=1e-6)
        assert found.beta_bytes_per_s == pytest.approx(beta, rel=1e-6)


def test_a_fit_weighs_relative_errors():
    """A large message that is 10 % off moves beta by about 10 % and leaves alpha alone."""
    sizes = [1e3, 1e9]
    found = alpha_beta.fit(
        "send",
        2,
        sizes,
        [alpha_beta.time_s("send", 2, 1e3, LINK), 1.1 * alpha_beta.time_s("send", 2, 1e9, LINK)],
    )
    assert found.alpha_s == pytest.approx(LINK.alpha_s, rel=2e-3)
    assert found.beta_bytes_per_s == pytest.approx(LINK.beta_bytes_per_s / 1.1, rel=1e-3)


def test_noise_never_gives_a_negative_link():
    # the larger one was faster
    assert alpha_beta.fit("send", 2, [1e3, 1e6], [2e-3, 1e-3]).beta_bytes_per_s == math.inf
    steep = alpha_beta.fit("send", 2, [1e6, 2e6], [1e-3, 5e-3])
    assert steep.alpha_s == 0 and steep.beta_bytes_per_s > 0
    assert alpha_beta.time_s("send", 2, 1e9, Link(1e-3, math.inf)) == 1e-3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: alpha_beta.time_s("all_reduec", 4, 1, LINK),
            "no formula for 'all_reduec': choose one of send, all_reduce",
        ),
        (lambda: alpha_beta.messages("all_reduce", 0), "p=0: a collective needs at least 1 rank"),
        (lambda: alpha_beta.fit("send", 2, [1e3, 1e3], [1, 1]), "1 of them different"),
        (lambda: alpha_beta.fit("send", 2, [1e3], [1, 2]), "2 times for 1 sizes"),
        (lambda: alpha_beta.fit("send", 2, [1e3, 1e4], [0, 1]), "one time above 0"),
        (lambda: alpha_beta.fit("all_reduce", 1, [1e3, 1e4], [1, 2]), "measure on 2 ranks or more"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
