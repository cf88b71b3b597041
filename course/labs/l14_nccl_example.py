"""Lesson 14: the log that NCCL writes with NCCL_DEBUG=INFO, for machines without GPUs.

No such log can be had without GPUs, so this one is made up in its documented form.

Source: docs.nvidia.com/deeplearning/nccl/user-guide, NCCL_DEBUG; the form of NCCL 2.21, as logs in
github.com/NVIDIA/nccl issues show it.
"""

from collections.abc import Iterator

CHANNELS = 2


def two_nodes(rdma: bool = True, gpus: int = 4) -> str:
    """Two nodes whose ranks form one ring of two channels.

    Inside a node the ranks talk over P2P; between the nodes over RDMA, or TCP without it.

    Args:
        rdma: Whether NCCL finds the InfiniBand card of each node.
        gpus: Number of GPUs of each node, one rank each.
    """
    lines = ["gpu01:700:700 [0] NCCL INFO NCCL version 2.21.5+cuda12.4"]
    for rank in range(2 * gpus):
        node, gpu = divmod(rank, gpus)
        head = f"gpu0{node + 1}:{700 + gpu}:{900 + gpu} [{gpu}] NCCL INFO "
        lines += [head + text for text in _of_rank(rank, gpus, rdma)]
    return "\n".join(lines) + "\n"


def _of_rank(rank: int, gpus: int, rdma: bool) -> Iterator[str]:
    """What one rank prints, without the head of the lines."""
    size = 2 * gpus
    node, gpu = divmod(rank, gpus)
    interface = f"eth0:10.0.0.{node + 1}<0>"
    comm = (
        f"ncclCommInitRank comm 0x55d0c{rank:03x} rank {rank} nranks {size} "
        f"cudaDev {gpu} nvmlDev {gpu} busId {gpu + 1}a000 commId 0x3c5a91d2e7f0b846"
    )
    yield f"Bootstrap : Using {interface}"
    if rdma:
        yield f"NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB {interface}"
        yield "Using network IB"
    else:
        yield "NET/IB : No device found."
        yield f"NET/Socket : Using [0]{interface}"
        yield "Using network Socket"
    yield f"{comm} - Init START"
    if rank == 0:
        ring = " ".join(map(str, range(size)))
        for channel in range(CHANNELS):
            yield f"Channel {channel:02}/02 : {ring}"
    network = "NET/IB/0/GDRDMA" if rdma else "NET/Socket/0"
    for channel in range(CHANNELS):
        for link in _links(rank, gpus, network):
            yield f"Channel {channel:02}/0 : {link}"
    yield "Connected all rings"
    yield f"{comm} - Init COMPLETE"


def _links(rank: int, gpus: int, network: str) -> Iterator[str]:
    """The links of one rank in a channel.

    Both ends tell of a link through the network, the sender alone of one inside a node.
    """
    size = 2 * gpus
    before = (rank - 1) % size
    after = (rank + 1) % size
    gpu = rank % gpus
    if gpu == 0:
        yield f"{before}[{gpus - 1}] -> {rank}[0] [receive] via {network}"
    if gpu == gpus - 1:
        yield f"{rank}[{gpu}] -> {after}[0] [send] via {network}"
    else:
        yield f"{rank}[{gpu}] -> {after}[{gpu + 1}] via P2P/CUMEM"
