"""An example of the log that NCCL writes with NCCL_DEBUG=INFO, in its documented form: no such log can be had without GPUs.

Source: docs.nvidia.com/deeplearning/nccl/user-guide, NCCL_DEBUG; the form of NCCL 2.21, as logs in github.com/NVIDIA/nccl
issues show it.
"""


def two_nodes(rdma: bool = True, gpus: int = 4) -> str:
    """Two nodes whose ranks form one ring, two channels: P2P inside a node; RDMA between the nodes, or TCP without it.

    Args:
        rdma: Whether NCCL finds the InfiniBand card of each node.
        gpus: Of each node, one rank each.
    """
    size, lines = 2 * gpus, ["gpu01:700:700 [0] NCCL INFO NCCL version 2.21.5+cuda12.4"]
    for rank in range(size):
        lines += _of_rank(rank, size, gpus, rdma)
    return "\n".join(lines) + "\n"


def _of_rank(rank, size, gpus, rdma):
    node, gpu = divmod(rank, gpus)
    head = f"gpu0{node + 1}:{700 + gpu}:{900 + gpu} [{gpu}] NCCL INFO "
    comm = f"ncclCommInitRank comm 0x55d0c{rank:03x} rank {rank} nranks {size} cudaDev {gpu} nvmlDev {gpu} busId {gpu + 1}a000"
    over = f"eth0:10.0.0.{node + 1}<0>"
    found = "NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB " + over
    lines = [f"Bootstrap : Using {over}", found if rdma else "NET/IB : No device found."]
    lines += [] if rdma else [f"NET/Socket : Using [0]{over}"]
    lines += [
        f"Using network {'IB' if rdma else 'Socket'}",
        f"{comm} commId 0x3c5a91d2e7f0b846 - Init START",
    ]
    if rank == 0:
        lines += [
            f"Channel {channel:02}/02 : {' '.join(map(str, range(size)))}" for channel in range(2)
        ]
    for channel in range(2):
        lines += _links(
            rank,
            size,
            gpus,
            f"Channel {channel:02}/0 : ",
            "NET/IB/0/GDRDMA" if rdma else "NET/Socket/0",
        )
    return [
        head + line
        for line in [
            *lines,
            "Connected all rings",
            f"{comm} commId 0x3c5a91d2e7f0b846 - Init COMPLETE",
        ]
    ]


def _links(rank, size, gpus, channel, network):
    """What one rank prints of one channel: both ends tell of a link through the network, the sender alone of another."""
    before, after, gpu = (rank - 1) % size, (rank + 1) % size, rank % gpus
    if gpu == 0:
        yield f"{channel}{before}[{gpus - 1}] -> {rank}[0] [receive] via {network}"
    if gpu == gpus - 1:
        yield f"{channel}{rank}[{gpu}] -> {after}[0] [send] via {network}"
    else:
        yield f"{channel}{rank}[{gpu}] -> {after}[{gpu + 1}] via P2P/CUMEM"
