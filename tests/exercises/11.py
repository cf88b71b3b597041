"""Answers to the exercises of lesson 11, context parallel."""

import math

import torch
import torch.distributed as dist
from answers import Answers, changed

from labcode.comm import ring
from labcode.parallel.attention_block import PLAIN, merge

# ---- 11.1 the merge


def merged(out_a, lse_a, out_b, lse_b):
    """Subtracts the larger lse of each row."""
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


def merged_in_place(out_a, lse_a, out_b, lse_b):
    """Writes into the first block and gives it back: allowed."""
    lse = torch.logaddexp(lse_a, lse_b)
    out_a.mul_((lse_a - lse).exp()[..., None]).add_(out_b * (lse_b - lse).exp()[..., None])
    lse_a.copy_(lse)
    return out_a, lse_a


OUT = "out = out_a * share_a[..., None] + out_b * share_b[..., None]"
LOG_SUM = "torch.logaddexp(lse_a, lse_b)"
RETURN = "return out, lse"
UNLESS_EMPTY = """\
    lse = torch =>     if torch.isinf(lse_a).{0}():
        return out_b, lse_b
    if torch.isinf(lse_b).{0}():
        return out_a, lse_a
    lse = torch"""
ONE_MAXIMUM = (
    "    lse = torch =>     top = torch.max(lse_a.max(), lse_b.max())\n    lse = torch",
    f"{LOG_SUM} => top + ((lse_a - top).exp() + (lse_b - top).exp()).log()",
)


def zero_for_no_key(out_a, lse_a, out_b, lse_b):
    top = torch.maximum(lse_a.nan_to_num(neginf=0), lse_b.nan_to_num(neginf=0))
    share_a = (lse_a - top).exp()
    share_b = (lse_b - top).exp()
    both = share_a + share_b
    out = (out_a * share_a[..., None] + out_b * share_b[..., None]) / both[..., None]
    return out, top + both.log()


MERGE = Answers(
    solves="my_merge",
    takes_ranks=False,
    right={
        "maximum": merged,
        "softmax of the two": merged_with_softmax,
        "sigmoid": merged_with_sigmoid,
        "in place": merged_in_place,
        "a list": changed(f"{RETURN} => return [out, lse]"),
        "empty blocks apart": changed(UNLESS_EMPTY.format("all")),
    },
    wrong={
        "mean": (changed(f"{OUT} => out = (out_a + out_b) / 2"), "plain mean"),
        "sum": (changed(f"{OUT} => out = out_a + out_b"), "add up to 1"),
        "logs added": (changed(f"{RETURN} => return out, lse_a + lse_b"), "you add the logarithms"),
        "weighted by lse": (
            changed(
                "share_a = (lse_a - lse).exp() => share_a = lse_a / (lse_a + lse_b)",
                "share_b = (lse_b - lse).exp() => share_b = lse_b / (lse_a + lse_b)",
            ),
            "share of the common denominator",
        ),
        "larger lse": (
            changed(f"{RETURN} => return out, torch.maximum(lse_a, lse_b)"),
            "denominator of both",
        ),
        "overflows": (changed(f"{LOG_SUM} => (lse_a.exp() + lse_b.exp()).log()"), "overflows"),
        "anchored at the first": (
            changed(f"{LOG_SUM} => lse_a + torch.log1p((lse_b - lse_a).exp())"),
            "whichever of the two lse is larger",
        ),
        "anchored at the second": (
            changed(f"{LOG_SUM} => lse_b + torch.log1p((lse_a - lse_b).exp())"),
            "whichever of the two lse is larger",
        ),
        "only the second may be empty": (
            changed(f"{LOG_SUM} => lse_a + torch.logaddexp(lse_b - lse_a, torch.zeros(()))"),
            "where it is the first one",
        ),
        "one empty row counts for all": (
            changed(UNLESS_EMPTY.format("any")),
            "no row may depend on another",
        ),
        "one maximum for all rows": (changed(*ONE_MAXIMUM), "no row may depend on another"),
        "and without nan": (
            changed(*ONE_MAXIMUM, f"{RETURN} => return out.nan_to_num(), lse"),
            "no row may depend on another",
        ),
        "float32": (
            changed(f"{RETURN} => return out.float(), lse.float()"),
            "out is float32, and its inputs are float64",
        ),
        "lse in float32": (
            changed(f"{RETURN} => return out, lse.float()"),
            "lse is float32, and its inputs are float64",
        ),
        "labcode's": (
            changed(
                f"{RETURN} => attention_block.merge(out_a, lse_a, out_b, lse_b)\n"
                "    return out_a, lse_a"
            ),
            "labcode's own answer",
        ),
        "lse with a dim for D": (
            changed(f"{RETURN} => return out, lse[..., None]"),
            "lse is [2, 6, 1], expected is [2, 6]",
        ),
        "lse first": (changed(f"{RETURN} => return lse, out"), "swapped"),
        "one tensor": (changed(f"{RETURN} => return out"), "two tensors"),
        "rows and features confused": (
            changed("[..., None] => .sum()"),
            "share of the common denominator",
        ),
        "-inf counts as 0 in the maximum": (
            zero_for_no_key,
            "beside a block without any key (lse = -inf) scores of -5000 in the first block are",
        ),
    },
)

# ---- 11.2 the ring forward


def pass_on(x, group, step=1):
    """Sends x `step` ranks on; returns what came."""
    rank, p = dist.get_rank(group), dist.get_world_size(group)
    arrived = torch.empty_like(x)
    messages = [
        dist.P2POp(dist.isend, x.contiguous(), group=group, group_peer=(rank + step) % p),
        dist.P2POp(dist.irecv, arrived, group=group, group_peer=(rank - step) % p),
    ]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    return arrived


def forward_the_other_way(q, k, v, group):
    """Parts travel to the left, keys and values apart."""
    rank, p = dist.get_rank(group), dist.get_world_size(group)
    out, lse = PLAIN.forward(q, k, v, True)
    for step in range(1, p):
        k = pass_on(k, group, -1)
        v = pass_on(v, group, -1)
        if (rank + step) % p < rank:
            out, lse = merged(out, lse, *PLAIN.forward(q, k, v, False))
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
            merge(out, lse, *PLAIN.forward(q, here[0], here[1], source == rank))
        if step < p - 1:
            coming = torch.empty_like(here)
            ring.exchange(here, (rank + 1) % p, coming, (rank - 1) % p, group)
            here = coming
    return out, lse


def forward_computing_meanwhile(q, k, v, group):
    """A part travels on while it is computed with; the works live until the next step."""
    rank, p = dist.get_rank(group), dist.get_world_size(group)
    out, lse = PLAIN.forward(q, k, v, True)
    kv = torch.stack((k, v))
    for step in range(1, p + 1):
        works = []
        arrived = torch.empty_like(kv)
        if step < p:
            messages = [
                dist.P2POp(dist.isend, kv, group=group, group_peer=(rank + 1) % p),
                dist.P2POp(dist.irecv, arrived, group=group, group_peer=(rank - 1) % p),
            ]
            works = dist.batch_isend_irecv(messages)
        if step > 1 and (rank - step + 1) % p < rank:
            out, lse = merged(out, lse, *PLAIN.forward(q, kv[0], kv[1], False))
        for work in works:
            work.wait()
        kv = arrived
    return out, lse


EXCHANGE = "    for work in dist.batch_isend_irecv([send, receive]):\n        work.wait()"
ISEND = "dist.isend(x, group=group, group_dst=(rank + 1) % p)"
SEND = "dist.send(x, group=group, group_dst=(rank + 1) % p)"
RECV = "dist.recv(arrived, group=group, group_src=(rank - 1) % p)"
KV = "kv = torch.stack((k, v))"
PASS_ON = "kv = pass_on(kv, group)"
SOURCE = "source = (rank - step) % p"
MERGED = "attention_block.merge(out, lse, out_b, lse_b)"
KEPT = (f"{KV} => {KV}\n    kvs = [kv]", f"{PASS_ON} => {PASS_ON}\n        kvs.append(kv)")
BLOCK = "attend(q, kv[0], kv[1], causal=False)"


def while_it_travels(q, k, v, group):
    """Two views of a part live until the turn after it binds their names again."""
    rank = dist.get_rank(group)
    p = dist.get_world_size(group)
    here = torch.cat((k, v), dim=-1)
    out = None
    for step in range(p):
        moving = []
        if step + 1 < p:
            coming = torch.empty_like(here)
            receive = dist.P2POp(dist.irecv, coming, group=group, group_peer=(rank - 1) % p)
            send = dist.P2POp(dist.isend, here, group=group, group_peer=(rank + 1) % p)
            moving = dist.batch_isend_irecv([receive, send])
        source = (rank - step) % p
        if source <= rank:
            keys, values = here.chunk(2, dim=-1)
            out_b, lse_b = PLAIN.forward(q, keys, values, causal=source == rank)
            if out is None:
                out, lse = out_b, lse_b
            else:
                merge(out, lse, out_b, lse_b)
        for work in moving:
            work.wait()
        if moving:
            here = coming
    return out, lse


FORWARD = Answers(
    solves="ring_forward",
    right={
        "parts to the left, K and V apart": forward_the_other_way,
        "from an empty result": forward_in_place,
        "computing meanwhile": forward_computing_meanwhile,
        "isend and recv": changed(
            f"{EXCHANGE} =>     work = {ISEND}\n    {RECV}\n    work.wait()",
        ),
        "merging at the end": changed(
            f"{KV} => {KV}\n    blocks = []",
            f"{MERGED} => blocks.append((out_b, lse_b))",
            f"    {RETURN} =>     for block in blocks:\n"
            f"        attention_block.merge(out, lse, *block)\n    {RETURN}",
        ),
        "two places in one buffer": changed(
            "def pass_on(x, group): => def pass_on(x, group, arrived):",
            "    arrived = torch.empty_like(x)\n => ",
            f"{KV} => both = torch.stack((torch.stack((k, v)), torch.stack((k, v))))\n"
            "    kv = both[0]",
            f"{PASS_ON} => kv = pass_on(kv, group, both[step % 2])",
        ),
        "computes while the next part travels": while_it_travels,
    },
    wrong={
        "own keys only": (changed("range(1, p) => range(1, 1)"), "own keys alone"),
        "no mask at all": (
            changed("causal=True => causal=False", "source < rank => True"),
            "also over later ones",
        ),
        "later keys as well": (changed("source < rank => True"), "out is wrong"),
        "own block not causal": (changed("causal=True => causal=False"), "without the causal mask"),
        "every block causal": (
            changed("causal=False => causal=True"),
            "only the own block causal",
        ),
        "adds outputs": (changed(f"{MERGED} => out = out + out_b"), "each block merged once"),
        "the wrong source": (changed("rank - step => rank + step"), "out is wrong"),
        "own block twice": (
            changed(f"{KV} => {KV}\n    out, lse = my_merge(out, lse, *attend(q, k, v, False))"),
            "out is wrong",
        ),
        "a step too few": (changed("range(1, p) => range(1, p - 1)"), "out is wrong"),
        "a message too many": (
            changed(f"{RETURN} => pass_on(kv, group)\n    {RETURN}"),
            "are sent where 3 are enough",
        ),
        "stops when it sees nothing": (
            changed(
                f"        {PASS_ON}\n        {SOURCE} =>         {SOURCE}\n"
                f"        if source > rank:\n            break\n        {PASS_ON}"
            ),
            "waits",
        ),
        "all_gather": (
            changed(
                f"{KV} => {KV}\n    kvs = [torch.empty_like(kv) for _ in range(p)]\n"
                "    dist.all_gather(kvs, kv, group=group)",
                f"        {PASS_ON}\n => ",
                f"{SOURCE} => {SOURCE}\n        kv = kvs[source]",
            ),
            "all_gather does the work for you",
        ),
        "collects all parts": (
            changed(
                *KEPT,
                "source < rank => step == p - 1",
                f"{BLOCK} => "
                "attend(q, *torch.cat(kvs, -2)[..., 4 : 4 * rank + 4, :], causal=False)",
            ),
            "more than one part of K and V",
        ),
        "keeps all parts in a list": (changed(*KEPT), "arrived are in memory together"),
        "nobody waits": (
            changed(
                "work.wait() => pass",
                # as memory may be that nobody has written to
                "torch.empty_like(x) => torch.full_like(x, math.nan)",
            ),
            "3 irecvs started and 0 waited for",
        ),
        "isend never waited for": (
            changed(f"{EXCHANGE} =>     {ISEND}\n    {RECV}"),
            "isends started and 0 waited for",
        ),
        "waits for the send only": (
            changed("([send, receive]) => ([send, receive])[:1]"),
            "3 irecvs started and 0 waited for",
        ),
        "waits for the receive only": (
            changed("([send, receive]) => ([send, receive])[1:]"),
            "3 isends started and 0 waited for",
        ),
        "receives into what it sends": (
            changed("arrived = torch.empty_like(x) => arrived = x"),
            "still being sent",
        ),
        "changed while it is sent": (
            changed(
                f"{EXCHANGE} =>     work = {ISEND}\n    {RECV}\n    x.zero_()\n    work.wait()"
            ),
            "changed while its isend was under way",
        ),
        "two ranks on": (
            changed("rank + 1 => rank + 2", "rank - 1 => rank - 2"),
            "on rank 0: it sends to rank 2",
        ),
        "float32 on the wire": (
            changed(
                f"{KV} => {KV}.float()",
                f"{BLOCK} => attend(q, kv[0].double(), kv[1].double(), causal=False)",
            ),
            "messages are sent in float32",
        ),
        "bfloat16 on the wire": (
            changed(
                f"{KV} => {KV}.bfloat16()",
                f"{BLOCK} => attend(q, kv[0].double(), kv[1].double(), causal=False)",
            ),
            "messages are sent in bfloat16",
        ),
        "rounded at home": (changed("attend(q, => attend(q.float().double(),"), "cease to be"),
        "sends to everybody": (
            changed(
                "def pass_on(x, group): => def pass_on(x, group, step):",
                "rank + 1 => rank + step",
                "rank - 1 => rank - step",
                f"{KV} => own = torch.stack((k, v))",
                f"{PASS_ON} => kv = pass_on(own, group, step)",
            ),
            "one neighbour only",
        ),
        "labcode's": (
            changed(
                f"{KV} => core = layers.CoreAttention(causal=True)\n"
                '    return RingAttention(core, group, "contiguous")(q, k, v), lse'
            ),
            "labcode's own answer",
        ),
        "the group ignored": (
            changed(
                "get_rank(group) => get_rank()",
                "get_world_size(group) => get_world_size()",
                "group=group, group_peer= => peer=",
            ),
            "still speaks of all of them",
        ),
        "the rank of the world": (
            changed("get_rank(group) => get_rank()"),
            "still speaks of all of them",
        ),
        "all receive first": (changed(f"{EXCHANGE} =>     {RECV}\n    {SEND}"), "wait in recv"),
        "no end": (
            changed("for step in range(1, p): => step = 0\n    while True:"),
            "does your loop end",
        ),
        "out alone": (changed(f"{RETURN} => return out"), "two tensors"),
        "only keys travel": (
            changed(
                "kv = torch.stack((k, v)) => kv = k",
                "attend(q, kv[0], kv[1] => attend(q, kv, v",
            ),
            "do keys and values both travel?",
        ),
    },
)

# ---- 11.3 the ring backward


def backward_together(dout, q, k, v, out, lse, group):
    """K, V and their sums in one message; the last one carries the sums alone."""
    rank, p = dist.get_rank(group), dist.get_world_size(group)
    dq = torch.zeros_like(q)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for step in range(p):
        source = (rank - step) % p
        if source <= rank:
            dq_b, dk_b, dv_b = PLAIN.backward(dout, q, k, v, out, lse, source == rank)
            dq, dk, dv = dq + dq_b, dk + dk_b, dv + dv_b
        if step < p - 1:
            k, v, dk, dv = pass_on(torch.stack((k, v, dk, dv)), group).unbind(0)
    dk, dv = pass_on(torch.stack((dk, dv)), group)
    return dq, dk, dv


def backward_one_step_behind(dout, q, k, v, out, lse, group):
    """As labcode does it: the own sum stays at home, the others travel p - 1 hops."""
    rank, p = dist.get_rank(group), dist.get_world_size(group)
    dq, dk, dv = PLAIN.backward(dout, q, k, v, out, lse, True)
    kv = torch.stack((k, v))
    own = torch.stack((dk, dv))
    travelling = torch.zeros_like(kv)
    for step in range(1, p):
        kv = pass_on(kv, group)
        if step > 1:
            travelling = pass_on(travelling, group)
        if rank - step >= 0:
            dq_b, dk_b, dv_b = PLAIN.backward(dout, q, kv[0], kv[1], out, lse, False)
            dq = dq + dq_b
            travelling = travelling + torch.stack((dk_b, dv_b))
    own = own + pass_on(travelling, group)
    return dq, own[0], own[1]


def backward_straight_home(dout, q, k, v, out, lse, group):
    """Each term goes straight to the rank of its keys."""
    rank, p = dist.get_rank(group), dist.get_world_size(group)
    dq, dk, dv = PLAIN.backward(dout, q, k, v, out, lse, True)
    own = torch.stack((dk, dv))
    kv = torch.stack((k, v))
    for step in range(1, p):
        kv = pass_on(kv, group)
        term = torch.zeros_like(kv)
        if rank - step >= 0:
            dq_b, dk_b, dv_b = PLAIN.backward(dout, q, kv[0], kv[1], out, lse, False)
            dq = dq + dq_b
            term = torch.stack((dk_b, dv_b))
        own = own + pass_on(term, group, -step)
    return dq, own[0], own[1]


SUMS_ON = "dkv = pass_on(dkv, group)"
GRADS = "return dq, dkv[0], dkv[1]"

BACKWARD = Answers(
    solves="ring_backward",
    right={
        "one message": backward_together,
        "one step behind": backward_one_step_behind,
        "straight home": backward_straight_home,
    },
    wrong={
        "one hop short": (
            changed(f"{SUMS_ON} => dkv = pass_on(dkv, group) if step < p - 1 else dkv"),
            "how many more hops",
        ),
        "no hop": (changed(f"{SUMS_ON} => pass"), "terms of this rank's own queries alone"),
        "own terms only": (
            changed("terms[1] => terms[1] * own", "terms[2] => terms[2] * own"),
            "terms of this rank's own queries alone",
        ),
        "overwrites": (
            changed("dkv[0] += => dkv[0] =", "dkv[1] += => dkv[1] ="),
            "dq is right and dk is wrong",
        ),
        "later keys as well": (changed("source <= rank => True"), "dq is wrong"),
        "dq of own keys": (
            changed("terms[0] => terms[0] * own"),
            "terms of this rank's own keys alone",
        ),
        "the block's own lse": (
            changed(
                "terms = attend => out, lse = attend(q, kv[0], kv[1], own)\n"
                "            terms = attend"
            ),
            "Whose out and lse",
        ),
        "all causal": (changed("causal=own => causal=True"), "every block is treated as causal"),
        "the mean": (
            changed(f"{GRADS} => return dq, dkv[0] / p, dkv[1] / p"),
            "dk is the mean over the ranks",
        ),
        "dk and dv swapped": (
            changed(f"{GRADS} => return dq, dkv[1], dkv[0]"),
            "dk and dv are swapped",
        ),
        "K and V go too far": (changed("step < p - 1 => True"), "are sent where 7 are enough"),
        "changes k": (changed(f"{GRADS} => k += 1\n    {GRADS}"), "k has changed"),
        "a collective": (
            changed(f"{GRADS} => dist.all_reduce(dkv, group=group)\n    {GRADS}"),
            "all_reduce does the work for you",
        ),
        "sums in float32": (
            changed("zeros_like(kv) => zeros_like(kv, dtype=torch.float32)"),
            "messages are sent in float32",
        ),
        "isend never waited for": (
            changed(
                f"{KV} => {KV}\n    dist.isend(k, group=group, group_dst=(rank + 1) % p)\n"
                "    dist.recv(torch.empty_like(k), group=group, group_src=(rank - 1) % p)"
            ),
            "8 isends started and 7 waited for",
        ),
        "the group ignored": (
            changed("    rank = =>     group = dist.group.WORLD\n    rank ="),
            "still speaks of all of them",
        ),
        "two tensors": (changed(f"{GRADS} => return dkv[0], dkv[1]"), "three tensors"),
    },
)

# ---- 11.4 zig-zag

CHUNKS = "return rank, 2 * p - 1 - rank"
OWN = "return everything, everything, True"
EARLIER = "return everything, slice(0, half), False"
LATER = "return slice(half, tokens), everything, False"

DEAL = Answers(
    solves=("my_chunks", "my_block"),
    takes_ranks=False,
    right={
        "from the middle": changed(
            f"{CHUNKS} => return [p - 1 - rank, p + rank]", "source < rank => source > rank"
        ),
        "late first": changed(f"{CHUNKS} => return 2 * p - 1 - rank, rank"),
    },
    wrong={
        "in a row": (
            changed(f"{CHUNKS} => return 2 * rank, 2 * rank + 1"),
            "the same sum everywhere",
        ),
        "striped": (changed(f"{CHUNKS} => return rank, rank + p"), "the same sum everywhere"),
        "one too far": (changed(f"{CHUNKS} => return rank, 2 * p - rank"), "exactly one rank"),
        "one chunk": (changed(f"{CHUNKS} => return [rank]"), "exactly one rank"),
        "uneven": (
            changed(f"{CHUNKS} => return [[0, 1, 2], [3], [], []][rank]"),
            "holds two chunks",
        ),
        "everything of all": (
            changed(
                "slice(half, tokens) => everything", "slice(0, half) => everything", "True => False"
            ),
            "later than their queries",
        ),
        "as in a row": (changed(f"{LATER} => return None"), "leaves out"),
        "all keys of earlier ranks": (
            changed("slice(half, tokens) => everything", "slice(0, half) => everything"),
            "later than their queries",
        ),
        "own block not causal": (changed("True => False"), "later than their queries"),
        "halves swapped": (
            changed("slice(0, half) => slice(half, tokens)"),
            "later than their queries",
        ),
        "no slices": (changed("slice(0, tokens) => tokens"), "no slices"),
        "half of the tokens by /": (changed("// 2 => / 2"), "a slice takes whole numbers"),
        "tokens taken for a chunk": (
            changed("tokens // 2 => tokens\n    tokens = 2 * tokens"),
            "goes beyond the 6 tokens",
        ),
        "one slice": (
            changed(f"{OWN} => return everything"),
            "a slice of queries, a slice of keys",
        ),
        "causal with half of the keys": (
            changed(f"{EARLIER} => return everything, slice(0, half), True"),
            "in a causal block query i sees the keys 0 to i",
        ),
        "no return": (changed(f"{CHUNKS} => chunks = rank, 2 * p - 1 - rank"), "it returned None"),
        "no return in my_block": (
            changed(f"{OWN} => return"),
            "my_block(0, 0, 6): it returned None",
        ),
        "for powers of two only": (
            changed("2 * p - 1 - rank => rank ^ (2 * p - 1)"),
            "belongs to exactly one rank",
        ),
    },
)

# ---- 11.5 packed documents


def by_tokens(lengths, p):
    """Token by token: the tokens sorted by what they see, dealt forth and back."""
    seen = []
    start = 0
    for length in lengths:
        seen += [(position, start + position) for position in range(length)]
        start += length
    shares = [[] for _ in range(p)]
    for place, (_, token) in enumerate(sorted(seen)):
        turn, rank = divmod(place, p)
        shares[rank if turn % 2 == 0 else p - 1 - rank].append((token, token + 1))
    return shares


def from_the_middle(lengths, p):
    """The two chunks of each document that `p - 1 - rank` and `p + rank` name, as ranges."""
    shares = []
    for rank in range(p):
        pieces = []
        start = 0
        for length in lengths:
            size = length // (2 * p)
            for chunk in (p - 1 - rank, p + rank):
                first = start + chunk * size
                pieces.append(range(first, first + size))
            start += length
        shares.append(pieces)
    return tuple(shares)


def contiguous(lengths, p):
    size = sum(lengths) // p
    return [[(rank * size, (rank + 1) * size)] for rank in range(p)]


def zigzag_of_the_sequence(lengths, p):
    size = sum(lengths) // (2 * p)
    shares = []
    for rank in range(p):
        chunks = (rank, 2 * p - 1 - rank)
        shares.append([(chunk * size, (chunk + 1) * size) for chunk in chunks])
    return shares


def whole_documents(lengths, p):
    shares = [[] for _ in range(p)]
    start = 0
    for number, length in enumerate(lengths):
        shares[number % p].append((start, start + length))
        start += length
    return shares


CHUNKS_OF_DOCUMENT = "for chunk in (rank, 2 * p - 1 - rank):"
PIECE = "shares[rank].append((first, first + size))"
NEXT = "start += length"
SHARES = "return shares"

DOCUMENTS = Answers(
    solves="my_shares",
    takes_ranks=False,
    right={
        "token by token": by_tokens,
        "from the middle, as ranges": from_the_middle,
        "late chunk first": changed(
            f"{CHUNKS_OF_DOCUMENT} => for chunk in (2 * p - 1 - rank, rank):"
        ),
        "pieces as slices": changed(f"{PIECE} => shares[rank].append(slice(first, first + size))"),
    },
    wrong={
        "contiguous": (contiguous, "times a fair share of the scores"),
        "zig-zag of the whole sequence": (
            zigzag_of_the_sequence,
            "rank 3 computes 1.59 times a fair share",
        ),
        "each document contiguous": (
            changed(f"{CHUNKS_OF_DOCUMENT} => for chunk in (2 * rank, 2 * rank + 1):"),
            "times a fair share of the scores",
        ),
        "whole documents": (whole_documents, "their activations are uneven"),
        "two of p chunks": (
            changed("2 * p) => p)"),
            "is no part of the tokens 0 to 23",
        ),
        "every document at the start": (
            changed(f"{NEXT} => pass"),
            "is dealt to rank 0 and rank 0",
        ),
        "one chunk of a document": (
            changed(f"{CHUNKS_OF_DOCUMENT} => for chunk in (rank,):"),
            "12 of the 24 tokens belong to no rank, the first of them is token 12",
        ),
        "the last token left out": (
            changed(f"{PIECE} => shares[rank].append((first, first + size - 1))"),
            "tokens belong to no rank, the first of them is token 3",
        ),
        "one list for all ranks": (
            changed("[[] for _ in range(p)] => [[]] * p"),
            "is dealt to rank 0 and rank 1",
        ),
        "edges by /": (changed("// ( => / ("), "two whole numbers"),
        "tokens in place of pieces": (
            changed(f"{PIECE} => shares[rank].extend(range(first, first + size))"),
            "a piece is (start, stop)",
        ),
        "the shares of one rank": (changed(f"{SHARES} => return shares[0]"), "one for each rank"),
        "no return": (changed(f"{SHARES} => pass"), "it returned None"),
    },
)

ANSWERS = {"11.1": MERGE, "11.2": FORWARD, "11.3": BACKWARD, "11.4": DEAL, "11.5": DOCUMENTS}
