"""All-reduce written out with nothing but send and receive: the star, where one rank adds for all, and the ring.

    star             p-1 messages to rank 0, which adds, and p-1 back: rank 0 sends (p-1) n bytes, the others n
    ring             2 (p-1) messages between neighbours: every rank sends 2 (p-1)/p n bytes, and the sum is the same

On the ring the tensor is cut into p chunks, and each chunk is added up on its way round:

    reduce-scatter   p-1 steps: send a chunk to the right, add the one that comes from the left to one's own
    all-gather       p-1 steps: pass the finished chunks on

For learning and for counting; `dist.all_reduce` does the same, cuts finer and overlaps adding with receiving.
Source: Patarasuk, Yuan 2009 (doi 10.1016/j.jpdc.2008.09.002), section 3; Thakur et al. 2005 (doi 10.1177/1094342005051521).
Held by: tests/ranks/test_ring.py
"""

import psutil
import torch
import torch.distributed as dist


def exchange(
    send: torch.Tensor, to: int, receive: torch.Tensor, source: int, group: dist.ProcessGroup
) -> int:
    """Send one tensor while another is received; both are under way before either is waited for.

    Args:
        send: Contiguous, for group rank `to`.
        receive: Contiguous, filled with what group rank `source` sends; same number of elements as there.

    Returns:
        Bytes sent.
    """
    operations = []
    if send.numel():
        operations.append(dist.P2POp(dist.isend, send, group=group, group_peer=to))
    if receive.numel():  # an empty chunk, where p is larger than the tensor, travels no way
        operations.append(dist.P2POp(dist.irecv, receive, group=group, group_peer=source))
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    return send.numel() * send.element_size()


def reduce_scatter_phase(chunks: list[torch.Tensor], group: dist.ProcessGroup) -> int:
    """Add up each chunk over the ranks, in place; then chunk `(rank + 1) % p` is finished here, the others are partial sums.

    Args:
        chunks: p contiguous chunks; chunk c has the same size on every rank.

    Returns:
        Bytes sent by this rank, about `(p-1)/p` of all chunks.
    """
    rank, p = group.rank(), group.size()
    buffer = torch.empty_like(max(chunks, key=torch.Tensor.numel))
    sent = 0
    for step in range(p - 1):
        out, into = chunks[(rank - step) % p], chunks[(rank - step - 1) % p]
        arrived = buffer[: into.numel()]
        sent += exchange(out, (rank + 1) % p, arrived, (rank - 1) % p, group)
        into += arrived
    return sent


def all_gather_phase(chunks: list[torch.Tensor], group: dist.ProcessGroup) -> int:
    """Pass the finished chunks round the ring, in place, after `reduce_scatter_phase`.

    Returns:
        Bytes sent by this rank, about `(p-1)/p` of all chunks.
    """
    rank, p = group.rank(), group.size()
    sent = 0
    for step in range(p - 1):
        out, into = chunks[(rank + 1 - step) % p], chunks[(rank - step) % p]
        sent += exchange(out, (rank + 1) % p, into, (rank - 1) % p, group)
    return sent


def star_all_reduce(x: torch.Tensor, group: dist.ProcessGroup) -> int:
    """Sum `x` over the group, in place, on group rank 0, which sends the result back to everybody.

    Args:
        x: Any shape, contiguous, the same on every rank.

    Returns:
        Bytes sent by this rank.
    """
    if group.rank() != 0:
        dist.send(x, group=group, group_dst=0)
        dist.recv(x, group=group, group_src=0)
        return x.numel() * x.element_size()
    arrived = torch.empty_like(x)
    for source in range(1, group.size()):
        dist.recv(arrived, group=group, group_src=source)
        x += arrived
    for to in range(1, group.size()):
        dist.send(x, group=group, group_dst=to)
    return (group.size() - 1) * x.numel() * x.element_size()


def all_reduce(x: torch.Tensor, group: dist.ProcessGroup) -> int:
    """Sum `x` over the group, in place, on a ring, as `dist.all_reduce` does.

        2 (p-1) messages and 2 (p-1)/p times the bytes of x, sent and received by each rank

    Args:
        x: Any shape, contiguous, the same on every rank; sizes that p does not divide give uneven chunks.

    Returns:
        Bytes sent by this rank.

    Raises:
        ValueError: `x` is not contiguous, so its chunks cannot be sent in place.
    """
    if not x.is_contiguous():
        raise ValueError(
            f"a tensor of shape {list(x.shape)} and strides {x.stride()} is not contiguous: call .contiguous()"
        )
    chunks = list(x.view(-1).tensor_split(group.size()))
    return reduce_scatter_phase(chunks, group) + all_gather_phase(chunks, group)


def loopback_bytes() -> int:
    """Bytes that the loopback device of this machine has carried since it started, for all programs.

    Messages between ranks on one machine go through it, packet headers included: the difference of two readings tells what
    a collective really sent, whoever wrote it.
    """
    devices = psutil.net_io_counters(pernic=True)
    return sum(counters.bytes_sent for name, counters in devices.items() if name.startswith("lo"))
