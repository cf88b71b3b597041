"""Solutions that cells of lesson 11 show and use; `make notebooks` writes this."""

from labcode.comm.counting import counted
from labcode.models import layers
from labcode.parallel import attention_block
from labcode.parallel.context import RingAttention
from labcode.parallel.context import take_own
from labcode.perf import alpha_beta
from labcode.perf.saved_bytes import saved_bytes
from typing import NamedTuple
import math
import torch
import torch.distributed as dist


def attend(q, k, v, causal):
    """q [.., Q, D], k and v [.., K, D] -> out [.., Q, D], lse [.., Q]"""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    lse = scores.logsumexp(-1)
    out = (scores - lse[..., None]).exp() @ v
    return out, lse


def pass_on(x, group):
    """Send x to the next rank of the group; returns what the rank before has sent."""
    rank = dist.get_rank(group)
    p = dist.get_world_size(group)
    arrived = torch.empty_like(x)
    send = dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % p)
    receive = dist.P2POp(dist.irecv, arrived, group=group, group_peer=(rank - 1) % p)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
    return arrived

def ring_forward(q, k, v, group):
    """out and lse of this rank's queries over all keys that they may see."""
    rank = dist.get_rank(group)
    p = dist.get_world_size(group)
    out, lse = attend(q, k, v, causal=True)
    kv = torch.stack((k, v))
    for step in range(1, p):
        kv = pass_on(kv, group)
        source = (rank - step) % p
        if source < rank:
            out_b, lse_b = attend(q, kv[0], kv[1], causal=False)
            attention_block.merge(out, lse, out_b, lse_b)
    return out, lse


class Beside(NamedTuple):
    """An attention over ranks beside that of one process."""

    off: float  # largest difference of output and gradients
    forward_bytes: float  # sent
    backward_bytes: float
    kept_bytes: int

def wire_bytes(calls):
    """Bytes that a rank sends; a collective counts as on a ring."""
    sent = 0
    for call in calls:
        if call.kind != "recv":
            sent += alpha_beta.bytes_sent(call.kind, call.group_size, call.num_bytes)
    return sent

def beside_one_process(rank, attention, layout, dtype, heads=4, key_heads=4):
    """Run both, forward and backward."""
    group = dist.group.WORLD
    core = layers.CoreAttention(causal=True)
    draw = torch.Generator().manual_seed(0)
    wholes = []
    parts = []
    for own_heads in (heads, key_heads, key_heads):  # of q, k and v
        whole = torch.randn(1, own_heads, 1024, 32, generator=draw).to(dtype)
        own = take_own(whole, group, 2, layout)  # [B, heads, S/p, D]
        parts.append(own.requires_grad_())
        wholes.append(whole.requires_grad_())
    expected = core(*wholes)
    expected.square().sum().backward()

    with saved_bytes(core) as saved, counted() as forward:
        out = attention(core, group, layout, *parts)
        kept_bytes = saved.total()
    with counted() as backward:
        out.square().sum().backward()
    differences = [out - take_own(expected, group, 2, layout)]
    for part, whole in zip(parts, wholes):
        differences.append(part.grad - take_own(whole.grad, group, 2, layout))
    off = max(one.abs().max().item() for one in differences)
    return Beside(off, wire_bytes(forward), wire_bytes(backward), kept_bytes)

def with_ring(core, group, layout, q, k, v):
    """labcode's ring in place of `core`."""
    ring = RingAttention(core, group, layout)
    ring.length = 1024  # S; without it the ranks would ask each other
    return ring(q, k, v)
