"""All-reduce written out with nothing but send and receive: as a star, and as a ring.

    star   p-1 messages to rank 0, which adds them up, and p-1 back: rank 0 sends (p-1) n bytes,
           the others n
    ring   2 (p-1) messages between neighbours: every rank sends 2 (p-1)/p n bytes, and in sum
           they send as much as on the star

On the ring the tensor is cut into p chunks, and each chunk is added up on its way round. With
three ranks and chunks a, b, c, where a012 is the sum of chunk a over the ranks 0, 1 and 2:

                                    rank 0            rank 1            rank 2
    reduce-scatter, p-1 steps:
      send to the right             a0                b1                c2
      add what comes from the left  c02               a01               b12
      send on                       c02               a01               b12
      add                           b012              c012              a012
    all-gather, p-1 steps: pass the finished chunks on until every rank has all of them

This is for learning and for counting. `dist.all_reduce` does the same, cuts the tensor into smaller
pieces and overlaps adding with receiving.

Source: Patarasuk, Yuan 2009 (doi 10.1016/j.jpdc.2008.09.002), section 3;
    Thakur et al. 2005 (doi 10.1177/1094342005051521).
Held by: tests/ranks/test_ring.py
"""

import psutil
import torch
import torch.distributed as dist


def exchange(
    send: torch.Tensor, to: int, receive: torch.Tensor, source: int, group: dist.ProcessGroup
) -> int:
    """Send one tensor while receiving another, and wait for both.

    The arguments are those of `start_exchange`.

    Returns:
        Bytes sent.
    """
    for work in start_exchange(send, to, receive, source, group):
        work.wait()
    return send.numel() * send.element_size()


def start_exchange(
    send: torch.Tensor, to: int, receive: torch.Tensor, source: int, group: dist.ProcessGroup
) -> list[dist.Work]:
    """Start to send one tensor and to receive another.

    They are one batch: if each rank of a ring waited for its send first, each would wait for a
    receiver. Empty tensors, which exist where there are more ranks than rows, are not sent; both
    sides know the shape, so neither waits for the other.

    Args:
        send: The tensor for group rank `to`, contiguous.
        to: The receiver, a rank of the group.
        receive: The tensor to fill with what group rank `source` sends, contiguous, of the size of
            what is sent there.
        source: The sender, a rank of the group.
        group: The ranks of the ring.

    Returns:
        The works to wait for.
    """
    operations = []
    # group_peer counts within the group; `peer` would be a global rank
    if send.numel():
        operations.append(dist.P2POp(dist.isend, send, group=group, group_peer=to))
    if receive.numel():
        operations.append(dist.P2POp(dist.irecv, receive, group=group, group_peer=source))
    return dist.batch_isend_irecv(operations) if operations else []


def _place_on_the_ring(group: dist.ProcessGroup) -> tuple[int, int, int, int]:
    """(rank, number of ranks, right neighbour, left neighbour) in the group."""
    rank = group.rank()
    p = group.size()
    return rank, p, (rank + 1) % p, (rank - 1) % p


def reduce_scatter_phase(chunks: list[torch.Tensor], group: dist.ProcessGroup) -> int:
    """Add up each chunk over the ranks, in place.

    Afterwards chunk `(rank + 1) % p` is finished on this rank; the others are partial sums.

    Args:
        chunks: p contiguous chunks; chunk c has the same size on every rank.

    Returns:
        Bytes sent by this rank, about `(p-1)/p` of all chunks.
    """
    rank, p, right, left = _place_on_the_ring(group)
    # One buffer of the largest chunk serves all steps: what has arrived is added before the next
    # message is received. So the ring needs n/p numbers of memory beside the tensor itself.
    largest = max(chunk.numel() for chunk in chunks)
    buffer = chunks[0].new_empty(largest)
    sent = 0
    for step in range(p - 1):
        # In step 0 the chunk has this rank's values alone. From step 1 on it is the chunk that was
        # added to in the step before: a chunk gets one more rank's values at each hop.
        outgoing = chunks[(rank - step) % p]
        # what the left neighbour sends in this step is the chunk before ours
        growing = chunks[(rank - step - 1) % p]
        arrived = buffer[: growing.numel()]
        sent += exchange(outgoing, right, arrived, left, group)
        growing += arrived
    return sent


def all_gather_phase(chunks: list[torch.Tensor], group: dist.ProcessGroup) -> int:
    """Pass the finished chunks round the ring, in place, after `reduce_scatter_phase`.

    Returns:
        Bytes sent by this rank, about `(p-1)/p` of all chunks.
    """
    rank, p, right, left = _place_on_the_ring(group)
    sent = 0
    for step in range(p - 1):
        # Step 0 sends the chunk that the phase before has finished here, step 1 the one that came
        # in step 0, and so on: nothing is sent twice over the same link.
        finished = chunks[(rank + 1 - step) % p]
        # Received in place: the partial sum that lies there is of no use any more.
        next_one = chunks[(rank - step) % p]
        sent += exchange(finished, right, next_one, left, group)
    return sent


def star_all_reduce(x: torch.Tensor, group: dist.ProcessGroup) -> int:
    """Sum `x` over the group, in place, on group rank 0, which sends the result back to everybody.

    Args:
        x: Any shape, contiguous, the same on every rank.

    Returns:
        Bytes sent by this rank.
    """
    num_bytes = x.numel() * x.element_size()
    if group.rank() != 0:
        dist.send(x, group=group, group_dst=0)
        dist.recv(x, group=group, group_src=0)
        return num_bytes
    arrived = torch.empty_like(x)
    for source in range(1, group.size()):
        dist.recv(arrived, group=group, group_src=source)
        x += arrived
    for to in range(1, group.size()):
        dist.send(x, group=group, group_dst=to)
    return (group.size() - 1) * num_bytes


def all_reduce(x: torch.Tensor, group: dist.ProcessGroup) -> int:
    """Sum `x` over the group, in place, on a ring, as `dist.all_reduce` does.

        2 (p-1) messages and 2 (p-1)/p times the bytes of x, sent and received by each rank

    Args:
        x: Any shape, contiguous, the same on every rank; if its size is not divisible by p, the
            chunks are uneven.

    Returns:
        Bytes sent by this rank.

    Raises:
        ValueError: `x` is not contiguous, so its chunks cannot be sent in place.
    """
    if not x.is_contiguous():
        raise ValueError(
            f"a tensor of shape {list(x.shape)} and strides {x.stride()} is not contiguous: "
            "call .contiguous()"
        )
    # Views of x, so that both phases write into it. tensor_split and not chunk: chunk rounds the
    # size up, and 9 numbers over 4 ranks would make 3 chunks.
    chunks = list(x.view(-1).tensor_split(group.size()))
    sent = reduce_scatter_phase(chunks, group)
    sent += all_gather_phase(chunks, group)
    return sent


def loopback_bytes() -> int:
    """Bytes that this machine's loopback device has carried since boot, for all programs.

    Messages between ranks on one machine go through it, packet headers included. The difference of
    two readings is what a collective really sent, whatever its implementation.
    """
    devices = psutil.net_io_counters(pernic=True)
    total = 0
    for name, counters in devices.items():
        if name.startswith("lo"):
            total += counters.bytes_sent
    return total
