"""The place of a process among its peers, before anything is connected."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Where a process stands among its peers, before anything is connected.

    Args:
        rank: Global rank, 0 to `world_size` - 1.
        world_size: Number of processes in the job.
        local_rank: Rank within this node.
        local_world_size: Number of processes on this node.
        launcher: "torchrun", "slurm", "single", or "pool" for the engines of `course.pool`.
        address: Host and port of the store where the ranks meet; None without a rendezvous over
            TCP.
        hosts_store: Whether this process opens that store; torchrun's agent may have opened it.
        attempt: The number of restarts that the torchrun of this node has counted; the torchruns of
            other nodes may have counted another number (`meeting`).
        has_agent: Whether an agent of torchrun started this process. If the agent has gone, the
            process should end as well.
        job: What torchrun or SLURM calls the job; "" for processes that were started by hand.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    launcher: str = "single"
    address: tuple[str, int] | None = None
    hosts_store: bool = False
    attempt: int = 0
    has_agent: bool = False
    job: str = ""
