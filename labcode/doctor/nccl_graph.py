"""Who talks to whom over what: the communicators of a job, as plain data."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Rank:
    """One rank of a communicator; what the log does not tell is None.

    Args:
        rank: Number of the rank there.
        host: Name of its machine.
        gpu: Number of its GPU there, as CUDA counts.
        bus_id: PCI bus of the GPU, hexadecimal: "c8000" is 0000:c8:00.0.
        pid: Process id of the rank.
    """

    rank: int
    host: str
    gpu: int | None = None
    bus_id: str | None = None
    pid: int | None = None


@dataclass(frozen=True)
class NcclLink:
    """One direction of one channel between two ranks.

    Args:
        channel: Number of the channel; NCCL splits a message over all of them.
        source, target: Ranks.
        transport: "P2P" (GPU to GPU), "SHM" (through host memory), or "NET/Socket", "NET/IB", ...
            (through the network).
        detail: The transport as printed: "P2P/CUMEM/read", or "NET/IB/0/GDRDMA", where network card
            0 reads the GPU's memory itself (GPUDirect RDMA).
    """

    channel: int
    source: int
    target: int
    transport: str
    detail: str


@dataclass(frozen=True)
class Interface:
    """A network interface that NCCL chose.

    Args:
        host: Host of the interface.
        use: What for: "bootstrap", "NET/Socket", "NET/IB out of band".
        name: "eth0", ...
        address: The host's IP address there.
    """

    host: str
    use: str
    name: str
    address: str


@dataclass(frozen=True)
class TreeNode:
    """A rank's place in the tree of a channel.

    Args:
        channel: Number of the channel.
        rank: The rank.
        up: The rank that it sends its sums to; None at the root.
        down: The ranks that it takes sums from.
    """

    channel: int
    rank: int
    up: int | None
    down: tuple[int, ...]


@dataclass
class Communicator:
    """One communicator: its ranks, the links between them, its rings and trees.

    Args:
        id: NCCL's `commId`, the same on all ranks; "" where the version prints none.
        size: Number of ranks.
        ranks: Ranks by their number.
        links: Each once, although both ends print a link through the network.
        rings: The ranks in the order of the ring, by channel; only rank 0 prints them.
        trees: The place of each rank in each channel's tree.
    """

    id: str
    size: int
    ranks: dict[int, Rank] = field(default_factory=dict)
    links: list[NcclLink] = field(default_factory=list)
    rings: dict[int, tuple[int, ...]] = field(default_factory=dict)
    trees: list[TreeNode] = field(default_factory=list)

    @property
    def hosts(self) -> dict[str, list[int]]:
        """The ranks of each host."""
        found: dict[str, list[int]] = {}
        for rank in sorted(self.ranks):
            found.setdefault(self.ranks[rank].host, []).append(rank)
        return found

    def pairs(self) -> dict[tuple[int, int], dict[str, int]]:
        """{(source, target): {transport: number of channels}}."""
        found: dict[tuple[int, int], Counter[str]] = {}
        for link in self.links:
            pair = (link.source, link.target)
            found.setdefault(pair, Counter())[link.transport] += 1
        return {pair: dict(counts) for pair, counts in sorted(found.items())}

    def transports(self, between_hosts: bool) -> set[str]:
        """The transports between hosts, or within them."""
        found = set()
        for link in self.links:
            source = self.ranks.get(link.source)
            target = self.ranks.get(link.target)
            if source is None or target is None:
                continue  # the log is cut short: its host is not known
            if (source.host != target.host) == between_hosts:
                found.add(link.transport)
        return found


@dataclass
class NcclLog:
    """All that was read from a log.

    Args:
        version: Version of NCCL: "2.21.5".
        cuda: The version of CUDA that it was built for.
        communicators: One for each group of ranks.
        interfaces: The network interfaces in use, on each host.
        networks: What each host uses between nodes: "IB", "Socket", the name of a plugin.
        nics: RDMA devices of each host, ("mlx5_0", "IB" or "RoCE").
        settings: NCCL_ variables that NCCL found set.
        warnings: (host, text) of the lines that say WARN.
    """

    version: str | None = None
    cuda: str | None = None
    communicators: list[Communicator] = field(default_factory=list)
    interfaces: list[Interface] = field(default_factory=list)
    networks: dict[str, str] = field(default_factory=dict)
    nics: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    warnings: list[tuple[str, str]] = field(default_factory=list)

    @property
    def main(self) -> Communicator:
        """The communicator with the most ranks; of several such the one with the most links.

        Raises:
            ValueError: The log has none.
        """
        if not self.communicators:
            raise ValueError(
                "no communicator in this log: run with NCCL_DEBUG=INFO, on GPUs "
                "(gloo writes no such log)"
            )
        return max(self.communicators, key=lambda comm: (comm.size, len(comm.links)))
