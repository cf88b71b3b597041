"""Answers to the exercises of lesson 11, context parallel."""

import math

import torch
import torch.distributed as dist
from answers import Answers

from labcode.comm import ring
from labcode.models.layers import CoreAttention
from labcode.parallel.attention_block import merge
from labcode.parallel.context import RingAttention
from labcode.teach.exercises import l11
from labcode.topology import GridShape

# ---- 11.1 the merge


def merged(out_a, lse_a, out_b, lse_b):
    lse = torch.logaddexp(lse_a, lse_b)
    return out_a * (lse_a - lse).exp()[..., None] + out_b * (lse_b - lse).exp()[..., None], lse


def merged_with_the_maximum(out_a, lse_a, out_b, lse_b):
    top = torch.maximum(lse_a, lse_b)
    a = torch.exp(lse_a - top).unsqueeze(-1)
    b = torch.exp(lse_b - top).unsqueeze(-1)
    total = a + b
    return (a * out_a + b * out_b) / total, top + torch.log(total).squeeze(-1)


def merged_with_softmax(out_a, lse_a, out_b, lse_b):
    both = torch.stack((lse_a, lse_b))
    share = torch.softmax(both, 0)
    out = share[0][..., None] * out_a + share[1][..., None] * out_b
    return out, torch.logsumexp(both, 0)


def merged_with_sigmoid(out_a, lse_a, out_b, lse_b):
    share = torch.sigmoid(lse_b - lse_a)[..., None]
    return out_a + share * (out_b - out_a), torch.logaddexp(lse_a, lse_b)


def naive(out_a, lse_a, out_b, lse_b):
    a, b = lse_a.exp()[..., None], lse_b.exp()[..., None]
    return (out_a * a + out_b * b) / (a + b), (a + b).log().squeeze(-1)


def merged_in_place(out_a, lse_a, out_b, lse_b):
    """Writes into the first block and gives it back: allowed."""
    lse = torch.logaddexp(lse_a, lse_b)
    out_a.mul_((lse_a - lse).exp()[..., None]).add_(out_b * (lse_b - lse).exp()[..., None])
    lse_a.copy_(lse)
    return out_a, lse_a


def merged_by_labcode(out_a, lse_a, out_b, lse_b):
    merge(out_a, lse_a, out_b, lse_b)
    return out_a, lse_a


def anchored_at_a(out_a, lse_a, out_b, lse_b):
    """Subtracts the first lse, whichever is larger."""
    lse = lse_a + torch.log1p((lse_b - lse_a).exp())
    return out_a * (lse_a - lse).exp()[..., None] + out_b * (lse_b - lse).exp()[..., None], lse


def anchored_at_b(out_a, lse_a, out_b, lse_b):
    return anchored_at_a(out_b, lse_b, out_a, lse_a)


def only_b_may_be_empty(out_a, lse_a, out_b, lse_b):
    is_empty = torch.isinf(lse_b)
    apart = torch.where(is_empty, torch.zeros_like(lse_b), lse_b - lse_a)
    share = torch.where(is_empty, torch.zeros_like(apart), torch.sigmoid(apart))[..., None]
    more = torch.nn.functional.softplus(apart, threshold=1e9)
    large = torch.where(apart > 50, apart, more)
    lse = torch.where(is_empty, lse_a, lse_a + large)
    return out_a * (1 - share) + out_b * share, lse


def empty_as_a_whole(out_a, lse_a, out_b, lse_b):
    """One row without a key counts as a block without one."""
    if torch.isinf(lse_a).any():
        return out_b, lse_b
    if torch.isinf(lse_b).any():
        return out_a, lse_a
    return merged(out_a, lse_a, out_b, lse_b)


def merged_unless_empty(out_a, lse_a, out_b, lse_b):
    if torch.isinf(lse_a).all():
        return out_b, lse_b
    if torch.isinf(lse_b).all():
        return out_a, lse_a
    return merged(out_a, lse_a, out_b, lse_b)


def one_maximum(out_a, lse_a, out_b, lse_b):
    """Subtracts the largest lse of all rows."""
    top = torch.max(lse_a.max(), lse_b.max())
    a, b = (lse_a - top).exp(), (lse_b - top).exp()
    total = a + b
    out = (out_a * a[..., None] + out_b * b[..., None]) / total[..., None]
    return out, top + total.log()


def one_maximum_without_nan(out_a, lse_a, out_b, lse_b):
    out, lse = one_maximum(out_a, lse_a, out_b, lse_b)
    return out.nan_to_num(), lse


MERGE = Answers(
    check=lambda answer, ranks: l11.merge(answer),
    right={
        "logaddexp": merged,
        "maximum": merged_with_the_maximum,
        "softmax of the two": merged_with_softmax,
        "sigmoid": merged_with_sigmoid,
        "in place": merged_in_place,
        "a list": lambda *blocks: list(merged(*blocks)),
        "empty blocks apart": merged_unless_empty,
    },
    wrong={
        "mean": (lambda a, x, b, y: ((a + b) / 2, torch.logaddexp(x, y)), "plain mean"),
        "sum": (lambda a, x, b, y: (a + b, torch.logaddexp(x, y)), "add up to 1"),
        "logs added": (
            lambda a, x, b, y: (merged(a, x, b, y)[0], x + y),
            "you add the logarithms",
        ),
        "weighted by lse": (
            lambda a, x, b, y: (torch.lerp(a, b, (y / (x + y))[..., None]), torch.logaddexp(x, y)),
            "share of the common denominator",
        ),
        "larger lse": (
            lambda a, x, b, y: (merged(a, x, b, y)[0], torch.maximum(x, y)),
            "denominator of both",
        ),
        "overflows": (naive, "overflows"),
        "anchored at the first": (anchored_at_a, "whichever of the two lse is larger"),
        "anchored at the second": (anchored_at_b, "whichever of the two lse is larger"),
        "only the second may be empty": (only_b_may_be_empty, "where it is the first one"),
        "one empty row counts for all": (empty_as_a_whole, "no row may depend on another"),
        "one maximum for all rows": (one_maximum, "no row may depend on another"),
        "and without nan": (one_maximum_without_nan, "no row may depend on another"),
        "float32": (
            lambda *blocks: [x.float() for x in merged(*blocks)],
            "out is float32, and its inputs are float64",
        ),
        "lse in float32": (
            lambda *blocks: (merged(*blocks)[0], merged(*blocks)[1].float()),
            "lse is float32, and its inputs are float64",
        ),
        "labcode's": (merged_by_labcode, "labcode's own answer"),
        "lse with a dim for D": (
            lambda *blocks: (merged(*blocks)[0], merged(*blocks)[1][..., None]),
            "lse is [2, 6, 1], should be [2, 6]",
        ),
        "lse first": (lambda *blocks: merged(*blocks)[::-1], "swapped"),
        "one tensor": (lambda a, x, b, y: merged(a, x, b, y)[0], "two tensors"),
        "rows and features confused": (
            lambda a, x, b, y: (
                a * (x - torch.logaddexp(x, y)).exp().sum()
                + b * (y - torch.logaddexp(x, y)).exp().sum(),
                torch.logaddexp(x, y),
            ),
            "share of the common denominator",
        ),
    },
)

# ---- 11.2 the ring forward


def attend(q, k, v, causal):
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp() @ v, lse


def pass_on(x, group, step=1):
    rank, p = dist.get_rank(group), dist.get_world_size(group)
    arrived = torch.empty_like(x)
    messages = [
        dist.P2POp(dist.isend, x.contiguous(), group=group, group_peer=(rank + step) % p),
        dist.P2POp(dist.irecv, arrived, group=group, group_peer=(rank - step) % p),
    ]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    return arrived


def forward(
    q,
    k,
    v,
    group,
    skip_later=True,
    causal_own=True,
    only_own=False,
    extra_hop=False,
    stop_early=False,
    wrong_source=False,
    sum_in_place_of_merge=False,
    pass_only_what_is_seen=False,
    own_twice=False,
    all_causal=False,
):
    """The right answer, or one with a mistake."""
    rank, p = dist.get_rank(group), dist.get_world_size(group)
    out, lse = attend(q, k, v, causal=causal_own)
    if only_own:
        return out, lse
    kv = torch.stack((k, v))
    if own_twice:
        out, lse = merged(out, lse, *attend(q, k, v, False))
    for step in range(1, p - 1 if stop_early else p):
        source = (rank - step) % p
        if pass_only_what_is_seen and source > rank:
            break
        kv = pass_on(kv, group)
        if wrong_source:
            source = (rank + step) % p
        if source < rank or not skip_later:
            out_b, lse_b = attend(q, kv[0], kv[1], causal=all_causal)
            if sum_in_place_of_merge:
                out = out + out_b
            else:
                out, lse = merged(out, lse, out_b, lse_b)
    if extra_hop:
        pass_on(kv, group)
    return out, lse


def forward_the_other_way(q, k, v, group):
    """Parts travel to the left."""
    rank, p = dist.get_rank(group), dist.get_world_size(group)
    out, lse = attend(q, k, v, True)
    for step in range(1, p):
        k = pass_on(k, group, -1)
        v = pass_on(v, group, -1)
        if (rank + step) % p < rank:
            out, lse = merged(out, lse, *attend(q, k, v, False))
    return out, lse


def forward_in_place(q, k, v, group):
    """From an empty result, and with labcode's merge and exchange."""
    rank, p = dist.get_rank(group), dist.get_world_size(group)
    out = torch.zeros_like(q)
    lse = torch.full(q.shape[:-1], -math.inf, dtype=q.dtype)
    here = torch.stack([k, v])
    for step in range(p):
        source = (rank - step) % p
        if source <= rank:
            out_b, lse_b = attend(q, here[0], here[1], causal=source == rank)
            merge(out, lse, out_b, lse_b)
        if step < p - 1:
            coming = torch.empty_like(here)
            ring.exchange(here, (rank + 1) % p, coming, (rank - 1) % p, group)
            here = coming
    return out, lse


def forward_with_isend(q, k, v, group):
    rank, p = dist.get_rank(group), dist.get_world_size(group)
    source = rank
    out, lse = attend(q, k, v, True)
    kv = torch.cat((k, v), dim=-1)
    while True:
        source = (source - 1) % p
        if source == rank:
            return out, lse
        work = dist.isend(kv, group=group, group_dst=(rank + 1) % p)
        arrived = torch.empty_like(kv)
        dist.recv(arrived, group=group, group_src=(rank - 1) % p)
        work.wait()
        kv = arrived
        if source < rank:
            k_b, v_b = kv.chunk(2, -1)
            out, lse = merged(out, lse, *attend(q, k_b, v_b, False))


def forward_by_gathering(q, k, v, group):
    rank, p = dist.get_rank(group), dist.get_world_size(group)
    ks = [torch.empty_like(k) for _ in range(p)]
    vs = [torch.empty_like(v) for _ in range(p)]
    dist.all_gather(ks, k.contiguous(), group=group)
    dist.all_gather(vs, v.contiguous(), group=group)
    out, lse = attend(q, k, v, True)
    for source in range(rank):
        out, lse = merged(out, lse, *attend(q, ks[source], vs[source], False))
    return out, lse


def forward_collecting(q, k, v, group):
    """Passes the parts round and computes at the end, over all of them."""
    rank, p = dist.get_rank(group), dist.get_world_size(group)
    kv = torch.stack((k, v))
    parts = {rank: kv}
    for step in range(1, p):
        kv = pass_on(kv, group)
        parts[(rank - step) % p] = kv
    k_all, v_all = torch.cat([parts[i] for i in range(p)], dim=-2)
    scores = q @ k_all.mT / math.sqrt(q.shape[-1])
    first = rank * q.shape[2]
    positions = torch.arange(first, first + q.shape[2])
    hidden = torch.arange(k_all.shape[2]) > positions[:, None]
    scores = scores.masked_fill(hidden, -math.inf)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp() @ v_all, lse


def forward_in_a_list(q, k, v, group):
    """Merges each part when it is here, and keeps it all the same."""
    rank, p = dist.get_rank(group), dist.get_world_size(group)
    out, lse = attend(q, k, v, True)
    kvs = [torch.stack((k, v))]
    for step in range(1, p):
        kvs.append(pass_on(kvs[-1], group))
        if (rank - step) % p < rank:
            out, lse = merged(out, lse, *attend(q, *kvs[-1], False))
    return out, lse


def forward_computing_meanwhile(q, k, v, group):
    """A part travels on while it is computed with; the works live until the next step."""
    rank, p = dist.get_rank(group), dist.get_world_size(group)
    out, lse = attend(q, k, v, True)
    kv = torch.stack((k, v))
    for step in range(1, p + 1):
        works = []
        arrived = torch.empty_like(kv)
        if step < p:
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, kv, group=group, group_peer=(rank + 1) % p),
                    dist.P2POp(dist.irecv, arrived, group=group, group_peer=(rank - 1) % p),
                ]
            )
        if step > 1 and (rank - step + 1) % p < rank:
            out, lse = merged(out, lse, *attend(q, kv[0], kv[1], False))
        for work in works:
            work.wait()
        kv = arrived
    return out, lse


def forward_merging_at_the_end(q, k, v, group):
    """Keeps the outputs of the blocks, which are this rank's own."""
    rank, p = dist.get_rank(group), dist.get_world_size(group)
    kv = torch.stack((k, v))
    outs, lses = [], []
    for step in range(p):
        if step:
            kv = pass_on(kv, group)
        if (rank - step) % p <= rank:
            out_b, lse_b = attend(q, kv[0], kv[1], step == 0)
            outs.append(out_b)
            lses.append(lse_b)
    lse = torch.stack(lses).logsumexp(0)
    return sum(o * (x - lse).exp()[..., None] for o, x in zip(outs, lses)), lse


def forward_without_waiting(q, k, v, group):
    rank, p = dist.get_rank(group), dist.get_world_size(group)
    out, lse = attend(q, k, v, True)
    kv = torch.stack((k, v))
    for step in range(1, p):
        arrived = torch.full_like(kv, math.nan)  # as memory may be that nobody has written
        dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, kv, group=group, group_peer=(rank + 1) % p),
                dist.P2POp(dist.irecv, arrived, group=group, group_peer=(rank - 1) % p),
            ]
        )
        kv = arrived
        if (rank - step) % p < rank:
            out, lse = merged(out, lse, *attend(q, kv[0], kv[1], False))
    return out, lse


def forward_isend_never_waited(q, k, v, group):
    rank, p = dist.get_rank(group), dist.get_world_size(group)
    out, lse = attend(q, k, v, True)
    kv = torch.stack((k, v))
    for step in range(1, p):
        work = dist.isend(kv, group=group, group_dst=(rank + 1) % p)  # noqa: F841
        arrived = torch.empty_like(kv)
        dist.recv(arrived, group=group, group_src=(rank - 1) % p)
        kv = arrived
        if (rank - step) % p < rank:
            out, lse = merged(out, lse, *attend(q, kv[0], kv[1], False))
    return out, lse


def forward_waiting_for_one(q, k, v, group, number):
    """Of a send and a receive only one is waited for."""
    rank, p = dist.get_rank(group), dist.get_world_size(group)
    out, lse = attend(q, k, v, True)
    kv = torch.stack((k, v))
    for step in range(1, p):
        arrived = torch.empty_like(kv)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, kv, group=group, group_peer=(rank + 1) % p),
                dist.P2POp(dist.irecv, arrived, group=group, group_peer=(rank - 1) % p),
            ]
        )
        works[number].wait()
        kv = arrived
        if (rank - step) % p < rank:
            out, lse = merged(out, lse, *attend(q, kv[0], kv[1], False))
    return out, lse


def forward_into_what_is_sent(q, k, v, group):
    """Sends and receives with one tensor."""
    rank, p = dist.get_rank(group), dist.get_world_size(group)
    out, lse = attend(q, k, v, True)
    kv = torch.stack((k, v))
    for step in range(1, p):
        messages = [
            dist.P2POp(dist.isend, kv, group=group, group_peer=(rank + 1) % p),
            dist.P2POp(dist.irecv, kv, group=group, group_peer=(rank - 1) % p),
        ]
        for work in dist.batch_isend_irecv(messages):
            work.wait()
        if (rank - step) % p < rank:
            out, lse = merged(out, lse, *attend(q, kv[0], kv[1], False))
    return out, lse


def forward_in_two_places(q, k, v, group):
    """Sends from one half of a buffer and receives into the other half."""
    rank, p = dist.get_rank(group), dist.get_world_size(group)
    out, lse = attend(q, k, v, True)
    both = torch.empty(2, 2, *k.shape, dtype=k.dtype)
    both[0] = torch.stack((k, v))
    for step in range(1, p):
        here, other = (step - 1) % 2, step % 2
        messages = [
            dist.P2POp(dist.irecv, both[other], group=group, group_peer=(rank - 1) % p),
            dist.P2POp(dist.isend, both[here], group=group, group_peer=(rank + 1) % p),
        ]
        for work in dist.batch_isend_irecv(messages):
            work.wait()
        if (rank - step) % p < rank:
            out, lse = merged(out, lse, *attend(q, *both[other], False))
    return out, lse


def forward_two_ranks_on(q, k, v, group):
    """Each message goes to the rank after the next one."""
    rank, p = dist.get_rank(group), dist.get_world_size(group)
    out, lse = attend(q, k, v, True)
    kv = torch.stack((k, v))
    for step in range(1, p):
        kv = pass_on(kv, group, -2)
        if (rank - step) % p < rank:
            out, lse = merged(out, lse, *attend(q, kv[0], kv[1], False))
    return out, lse


def forward_in_short_numbers(q, k, v, group, dtype):
    """K and V travel in fewer bits."""
    rank, p = dist.get_rank(group), dist.get_world_size(group)
    out, lse = attend(q, k, v, True)
    kv = torch.stack((k, v)).to(dtype)
    for step in range(1, p):
        kv = pass_on(kv, group)
        if (rank - step) % p < rank:
            k_b, v_b = kv.to(k.dtype)
            out, lse = merged(out, lse, *attend(q, k_b, v_b, False))
    return out, lse


def forward_to_everybody(q, k, v, group):
    """Not a ring: each rank sends its part to each other rank."""
    rank, p = dist.get_rank(group), dist.get_world_size(group)
    out, lse = attend(q, k, v, True)
    own = torch.stack((k, v))
    for step in range(1, p):
        kv = pass_on(own, group, step)
        if (rank - step) % p < rank:
            out, lse = merged(out, lse, *attend(q, kv[0], kv[1], False))
    return out, lse


def forward_with_labcode(q, k, v, group):
    out = RingAttention(CoreAttention(causal=True), group, "contiguous")(q, k, v)
    return out, out.sum(-1)


def forward_in_the_world(q, k, v, group):
    return forward(q, k, v, dist.group.WORLD)


def forward_send_first(q, k, v, group):
    """Everybody sends to the right and waits; a large message would never leave."""
    rank, p = dist.get_rank(group), dist.get_world_size(group)
    kv = torch.stack((k, v))
    arrived = torch.empty_like(kv)
    dist.recv(arrived, group=group, group_src=(rank - 1) % p)
    dist.send(kv, group=group, group_dst=(rank + 1) % p)
    return attend(q, k, v, True)


def forward_for_ever(q, k, v, group):
    kv = torch.stack((k, v))
    while True:
        kv = pass_on(kv, group)


def option(**changes):
    return lambda q, k, v, group: forward(q, k, v, group, **changes)


FORWARD = Answers(
    check=l11.ring_forward,
    right={
        "parts to the right": lambda q, k, v, group: forward(q, k, v, group),
        "parts to the left, K and V apart": forward_the_other_way,
        "from an empty result": forward_in_place,
        "isend and recv": forward_with_isend,
        "computing meanwhile": forward_computing_meanwhile,
        "merging at the end": forward_merging_at_the_end,
        "two places in one buffer": forward_in_two_places,
    },
    wrong={
        "own keys only": (option(only_own=True), "own keys alone"),
        "no mask at all": (option(causal_own=False, skip_later=False), "also over later ones"),
        "later keys as well": (option(skip_later=False), "out is wrong"),
        "own block not causal": (option(causal_own=False), "without the causal mask"),
        "every block causal": (option(all_causal=True), "only the own block causal"),
        "adds outputs": (option(sum_in_place_of_merge=True), "each block merged once"),
        "the wrong source": (option(wrong_source=True), "out is wrong"),
        "own block twice": (option(own_twice=True), "out is wrong"),
        "a step too few": (option(stop_early=True), "out is wrong"),
        "a message too many": (option(extra_hop=True), "are sent where 3 are enough"),
        "stops when it sees nothing": (option(pass_only_what_is_seen=True), "waits"),
        "all_gather": (forward_by_gathering, "all_gather does the work for you"),
        "collects all parts": (forward_collecting, "more than one part of K and V"),
        "keeps all parts in a list": (forward_in_a_list, "arrived are in memory together"),
        "nobody waits": (forward_without_waiting, "`irecv` returned a request, and nobody waited"),
        "isend never waited for": (forward_isend_never_waited, "`isend` returned a request, and"),
        "waits for the send only": (
            lambda q, k, v, group: forward_waiting_for_one(q, k, v, group, 0),
            "`irecv` returned a request, and nobody waited",
        ),
        "waits for the receive only": (
            lambda q, k, v, group: forward_waiting_for_one(q, k, v, group, 1),
            "`isend` returned a request, and nobody waited",
        ),
        "receives into what it sends": (forward_into_what_is_sent, "still being sent"),
        "two ranks on": (forward_two_ranks_on, "on rank 0: it sends to rank 2"),
        "float32 on the wire": (
            lambda q, k, v, group: forward_in_short_numbers(q, k, v, group, torch.float32),
            "messages are sent in float32",
        ),
        "bfloat16 on the wire": (
            lambda q, k, v, group: forward_in_short_numbers(q, k, v, group, torch.bfloat16),
            "messages are sent in bfloat16",
        ),
        "rounded at home": (
            lambda q, k, v, group: forward(q.float().double(), k, v, group),
            "cease to be float64",
        ),
        "sends to everybody": (forward_to_everybody, "one neighbour only"),
        "labcode's": (forward_with_labcode, "labcode's own answer"),
        "the group ignored": (forward_in_the_world, "still speaks of all of them"),
        "all receive first": (forward_send_first, "waits"),
        "no end": (forward_for_ever, "does your loop end"),
        "out alone": (lambda q, k, v, group: forward(q, k, v, group)[0], "two tensors"),
    },
)

# ---- 11.3 the ring backward


def attend_backward(dout, q, k, v, out, lse, causal):
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    weights = (scores - lse[..., None]).exp()
    delta = (dout * out).sum(-1, keepdim=True)
    dscores = weights * (dout @ v.mT - delta) / math.sqrt(q.shape[-1])
    return dscores @ k, dscores.mT @ q, weights.mT @ dout


def backward(
    dout,
    q,
    k,
    v,
    out,
    lse,
    group,
    hops=None,
    local=False,
    overwrite=False,
    skip_later=True,
    forget_dq=False,
    local_lse=False,
    kv_hops=None,
    in_place=False,
    all_causal=False,
    mean=False,
    swapped=False,
):
    rank, p = dist.get_rank(group), dist.get_world_size(group)
    hops = p if hops is None else hops
    kv_hops = p - 1 if kv_hops is None else kv_hops
    kv = torch.stack((k, v))
    sums = torch.zeros_like(kv)
    dq = torch.zeros_like(q)
    for step in range(p):
        source = (rank - step) % p
        if source <= rank or not skip_later:
            seen_lse, seen_out = lse, out
            if local_lse:
                seen_out, seen_lse = attend(q, kv[0], kv[1], source == rank)
            causal = all_causal or source == rank
            grads = attend_backward(dout, q, kv[0], kv[1], seen_out, seen_lse, causal=causal)
            if not forget_dq or source == rank:
                dq += grads[0]
            if overwrite:
                sums = torch.stack(grads[1:])
            elif not local or source == rank:
                sums[0] += grads[1]
                sums[1] += grads[2]
        if step < kv_hops:
            kv = pass_on(kv, group)
        if step < hops:
            sums = pass_on(sums, group)
    if in_place:
        k.add_(1)
    if mean:
        sums = sums / p
    if swapped:
        return dq, sums[1], sums[0]
    return dq, sums[0], sums[1]


def backward_together(dout, q, k, v, out, lse, group):
    """K, V and their sums in one message; the last one carries the sums alone."""
    rank, p = dist.get_rank(group), dist.get_world_size(group)
    dq = torch.zeros_like(q)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for step in range(p):
        source = (rank - step) % p
        if source <= rank:
            dq_b, dk_b, dv_b = attend_backward(dout, q, k, v, out, lse, source == rank)
            dq, dk, dv = dq + dq_b, dk + dk_b, dv + dv_b
        if step < p - 1:
            k, v, dk, dv = pass_on(torch.stack((k, v, dk, dv)), group).unbind(0)
    dk, dv = pass_on(torch.stack((dk, dv)), group)
    return dq, dk, dv


def backward_one_step_behind(dout, q, k, v, out, lse, group):
    """As labcode does it: the own sum stays at home, the others travel p - 1 hops."""
    rank, p = dist.get_rank(group), dist.get_world_size(group)
    dq, dk, dv = attend_backward(dout, q, k, v, out, lse, True)
    kv = torch.stack((k, v))
    own = torch.stack((dk, dv))
    travelling = torch.zeros_like(kv)
    for step in range(1, p):
        kv = pass_on(kv, group)
        if step > 1:
            travelling = pass_on(travelling, group)
        if rank - step >= 0:
            dq_b, dk_b, dv_b = attend_backward(dout, q, kv[0], kv[1], out, lse, False)
            dq = dq + dq_b
            travelling = travelling + torch.stack((dk_b, dv_b))
    own = own + pass_on(travelling, group)
    return dq, own[0], own[1]


def backward_to_the_left(dout, q, k, v, out, lse, group):
    rank, p = dist.get_rank(group), dist.get_world_size(group)
    dq = torch.zeros_like(q)
    sums = [torch.zeros_like(k), torch.zeros_like(v)]
    for step in range(p):
        source = (rank + step) % p
        if source <= rank:
            terms = attend_backward(dout, q, k, v, out, lse, source == rank)
            dq += terms[0]
            sums = [sums[0] + terms[1], sums[1] + terms[2]]
        if step + 1 < p:
            k, v = pass_on(k, group, -1), pass_on(v, group, -1)
        sums = [pass_on(x, group, -1) for x in sums]
    return dq, *sums


def backward_straight_home(dout, q, k, v, out, lse, group):
    """Each term goes straight to the rank of its keys."""
    rank, p = dist.get_rank(group), dist.get_world_size(group)
    dq, dk, dv = attend_backward(dout, q, k, v, out, lse, True)
    own = torch.stack((dk, dv))
    kv = torch.stack((k, v))
    for step in range(1, p):
        kv = pass_on(kv, group)
        term = torch.zeros_like(kv)
        if rank - step >= 0:
            dq_b, dk_b, dv_b = attend_backward(dout, q, kv[0], kv[1], out, lse, False)
            dq = dq + dq_b
            term = torch.stack((dk_b, dv_b))
        own = own + pass_on(term, group, -step)
    return dq, own[0], own[1]


def backward_with_all_reduce(dout, q, k, v, out, lse, group):
    dq, dk, dv = backward(dout, q, k, v, out, lse, group)
    dist.all_reduce(torch.zeros(1), group=group)
    return dq, dk, dv


def backward_in_float32(dout, q, k, v, out, lse, group):
    """The sums travel in float32."""
    rank, p = dist.get_rank(group), dist.get_world_size(group)
    dq = torch.zeros_like(q)
    kv = torch.stack((k, v))
    sums = torch.zeros_like(kv, dtype=torch.float32)
    for step in range(p):
        source = (rank - step) % p
        if source <= rank:
            terms = attend_backward(dout, q, kv[0], kv[1], out, lse, source == rank)
            dq += terms[0]
            sums += torch.stack(terms[1:])
        if step < p - 1:
            kv = pass_on(kv, group)
        sums = pass_on(sums, group)
    return dq, sums[0], sums[1]


def backward_without_waiting(dout, q, k, v, out, lse, group):
    """K and V go round first, and only what arrives is waited for."""
    rank, p = dist.get_rank(group), dist.get_world_size(group)
    arrived = torch.empty_like(k)
    dist.isend(k, group=group, group_dst=(rank + 1) % p)
    dist.irecv(arrived, group=group, group_src=(rank - 1) % p).wait()
    return backward(dout, q, k, v, out, lse, group, kv_hops=p - 1)


def backwards(**changes):
    return lambda dout, q, k, v, out, lse, group: backward(
        dout, q, k, v, out, lse, group, **changes
    )


BACKWARD = Answers(
    check=l11.ring_backward,
    right={
        "two messages a step": lambda dout, q, k, v, out, lse, group: backward(
            dout, q, k, v, out, lse, group
        ),
        "one message": backward_together,
        "one step behind": backward_one_step_behind,
        "to the left": backward_to_the_left,
        "straight home": backward_straight_home,
    },
    wrong={
        "one hop short": (backwards(hops=3), "how many more hops"),
        "no hop": (backwards(hops=0), "terms of this rank's own queries alone"),
        "own terms only": (backwards(local=True), "terms of this rank's own queries alone"),
        "overwrites": (backwards(overwrite=True), "dq is right and dk is wrong"),
        "later keys as well": (backwards(skip_later=False), "dq is wrong"),
        "dq of own keys": (backwards(forget_dq=True), "terms of this rank's own keys alone"),
        "the block's own lse": (backwards(local_lse=True), "Whose out and lse"),
        "all causal": (backwards(all_causal=True), "every block is treated as causal"),
        "the mean": (backwards(mean=True), "dk is the mean over the ranks"),
        "dk and dv swapped": (backwards(swapped=True), "dk and dv are swapped"),
        "K and V go too far": (backwards(kv_hops=4), "are sent where 7 are enough"),
        "changes k": (backwards(in_place=True), "k has changed"),
        "a collective": (backward_with_all_reduce, "all_reduce does the work for you"),
        "sums in float32": (backward_in_float32, "messages are sent in float32"),
        "isend never waited for": (backward_without_waiting, "`isend` returned a request, and"),
        "the group ignored": (
            lambda dout, q, k, v, out, lse, group: backward(
                dout, q, k, v, out, lse, dist.group.WORLD
            ),
            "still speaks of all of them",
        ),
        "two tensors": (
            lambda *args: backward(*args)[1:],
            "three tensors",
        ),
    },
)

# ---- 11.4 zig-zag


def chunks(rank, p):
    return rank, 2 * p - 1 - rank


def block(rank, source, tokens):
    half = tokens // 2
    everything = slice(0, tokens)
    if source == rank:
        return everything, everything, True
    if source < rank:
        return everything, slice(0, half), False
    return slice(half, tokens), everything, False


def chunks_from_the_middle(rank, p):
    return [p - 1 - rank, p + rank]


def block_from_the_middle(rank, source, tokens):
    """Here a larger rank has an earlier first chunk and a later second one."""
    half = tokens // 2
    if source == rank:
        return slice(None), slice(None), True
    if source > rank:
        return slice(None), slice(None, half), False
    return slice(half, None), slice(None), False


def chunks_late_first(rank, p):
    return (2 * p - rank - 1, rank)


def two(my_chunks, my_block):
    return lambda: (my_chunks, my_block)


DEAL = Answers(
    check=lambda answer, ranks: l11.deal(*answer()),
    right={
        "early and late": two(chunks, block),
        "from the middle": two(chunks_from_the_middle, block_from_the_middle),
        "late first": two(chunks_late_first, block),
    },
    wrong={
        "in a row": (two(lambda r, p: [2 * r, 2 * r + 1], block), "the same sum everywhere"),
        "striped": (two(lambda r, p: [r, r + p], block), "the same sum everywhere"),
        "one too far": (two(lambda r, p: [r, 2 * p - r], block), "exactly one rank"),
        "one chunk": (two(lambda r, p: [r], block), "exactly one rank"),
        "uneven": (
            two(lambda r, p: [[0, 1, 2], [3]][r] if p == 2 else chunks(r, p), block),
            "holds two chunks",
        ),
        "everything of all": (
            two(chunks, lambda r, s, n: (slice(0, n), slice(0, n), False)),
            "later than their queries",
        ),
        "as in a row": (
            two(chunks, lambda r, s, n: block(r, s, n) if s <= r else None),
            "leaves out",
        ),
        "all keys of earlier ranks": (
            two(chunks, lambda r, s, n: (slice(0, n), slice(0, n), s == r)),
            "later than their queries",
        ),
        "own block not causal": (
            two(chunks, lambda r, s, n: (*block(r, s, n)[:2], False)),
            "later than their queries",
        ),
        "halves swapped": (
            two(
                chunks,
                lambda r, s, n: (
                    block(r, s, n) if s >= r else (slice(0, n), slice(n // 2, n), False)
                ),
            ),
            "later than their queries",
        ),
        "no slices": (two(chunks, lambda r, s, n: (n, n, False)), "no slices"),
        "half of the tokens by /": (
            two(chunks, lambda r, s, n: (slice(0, n), slice(0, n if s == r else n / 2), s == r)),
            "a slice takes whole numbers",
        ),
        "tokens taken for a chunk": (
            two(
                chunks,
                lambda r, s, n: (
                    (slice(0, 2 * n), slice(0, 2 * n), True)
                    if s == r
                    else (slice(0, 2 * n), slice(0, n), False)
                    if s < r
                    else (slice(n, 2 * n), slice(0, 2 * n), False)
                ),
            ),
            "goes beyond the 6 tokens",
        ),
        "one slice": (
            two(chunks, lambda r, s, n: slice(0, n)),
            "a slice of queries, a slice of keys",
        ),
        "no return": (two(lambda r, p: None, block), "it returned None"),
        "no return in my_block": (
            two(chunks, lambda r, s, n: None),
            "my_block(0, 0, 6): it returned None",
        ),
        "for powers of two only": (
            two(lambda r, p: (r, r ^ (2 * p - 1)), block),
            "belongs to exactly one rank",
        ),
    },
)

# ---- 11.5 a grid

GRID = Answers(
    check=lambda answer, ranks: l11.design(answer()),
    right={
        "tp fills a node": lambda: GridShape(dp=4, cp=2, tp=8),
        "dp second": lambda: GridShape(dp=4, cp=2, tp=8, order="tp-dp-cp-pp"),
        "pp second": lambda: GridShape(dp=4, cp=2, tp=8, order="tp-pp-cp-dp"),
    },
    wrong={
        "no tp": (lambda: GridShape(dp=8, cp=8), "weights: which axis"),
        "no cp": (lambda: GridShape(dp=8, tp=8), "activations: which axis"),
        "tp over two nodes": (lambda: GridShape(dp=4, tp=16), "most of it is tp"),
        "tp slowest": (
            lambda: GridShape(dp=4, cp=2, tp=8, order="pp-dp-cp-tp"),
            "whose groups lie on several nodes",
        ),
        "cp before tp": (
            lambda: GridShape(dp=4, cp=2, tp=8, order="cp-tp-dp-pp"),
            "most of it is tp, whose groups lie on several nodes",
        ),
        "long rings": (lambda: GridShape(cp=8, tp=8), "most of it is cp"),
        "too few": (lambda: GridShape(cp=2, tp=8), "there are 64 GPUs"),
        "too many copies": (lambda: GridShape(dp=16, tp=4), "dp = 16 does not divide the 8"),
        "a pipeline": (lambda: GridShape(dp=2, pp=2, cp=2, tp=8), "pp is 2"),
        "nothing": (lambda: None, "my_grid is None"),
        "more ranks than heads": (lambda: GridShape(tp=64), "num_heads=32"),
        "a dict": (lambda: {"dp": 4, "cp": 2, "tp": 8}, "is not a GridShape"),
    },
)

ANSWERS = {"11.1": MERGE, "11.2": FORWARD, "11.3": BACKWARD, "11.4": DEAL, "11.5": GRID}
