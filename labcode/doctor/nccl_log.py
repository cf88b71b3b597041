"""Who talks to whom over what: the log that NCCL writes with NCCL_DEBUG=INFO, read into plain data.

    log = read("train-17.out")          # or parse(text), with the lines of all ranks mixed
    log.main.pairs()                    # {(0, 1): {"P2P": 2}, (1, 2): {"NET/Socket": 2}, ...}: channels by transport

A line is `host:process:thread [GPU] NCCL INFO ...`, whatever a launcher wrote before it. A job makes several communicators
(one for each group of the grid); a rank is a number within one of them, and `main` is the largest.

Source: docs.nvidia.com/deeplearning/nccl/user-guide, NCCL_DEBUG; lines of NCCL 2.4 to 2.28 in its GitHub issues.
"""

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

_LINE = re.compile(
    r"(?P<host>[\w.-]+):(?P<pid>\d+):(?P<tid>\d+) \[(?P<gpu>-?\d+)\] (?:\S+:\d+ )?NCCL (?P<kind>\w+) (?P<text>.*)"
)
_VERSION = re.compile(r"NCCL version (\d+\.\d+(?:\.\d+)?)(?:\+cuda([\d.]+))?")
_COMM = re.compile(r"comm (0x\w+) rank (\d+) n[rR]anks (\d+)")
_FIELDS = {name: re.compile(rf"\b{name} (\w+)") for name in ("cudaDev", "busId", "commId")}
_END = r"(\d+)(?:\[(\w+)\])?"
_LINK = re.compile(
    rf"(?:Channel|Ring) (\d+)(?:/\d+)? : {_END} -> {_END}(?: \[(send|receive)\])? via (.+?)(?: comm .*)?$"
)
_ORDER = re.compile(r"Channel (\d+)/\d+ :((?:\s+\d+)+)\s*$")
_TREE = re.compile(r"\[(\d+)\] (-?\d+)/(-?\d+)/(-?\d+)->(-?\d+)->(-?\d+)")
_BOOTSTRAP = re.compile(r"Bootstrap ?: Using (?:\[\d+\])?([\w.-]+):(\S+?)<\d+>")
_SOCKET = re.compile(r"\[\d+\]([\w.-]+):(\S+?)<\d+>")
_NIC = re.compile(r"\[\d+\]([\w-]+):\d+(?:/(\w+))?")
_OUT_OF_BAND = re.compile(r"OOB ([\w.-]+):(\S+?)<\d+>")
_SET = re.compile(r"(NCCL_\w+) set (?:by environment )?to (\S+?)\.?$")


@dataclass(frozen=True)
class Rank:
    """One rank of a communicator; what the log does not tell is None.

    Args:
        rank: Its number there.
        host: Name of its machine.
        gpu: Number of its GPU there, as CUDA counts.
        bus_id: PCI bus of the GPU, hexadecimal: "c8000" is 0000:c8:00.0.
        pid: Its process.
    """

    rank: int
    host: str
    gpu: int | None = None
    bus_id: str | None = None
    pid: int | None = None


@dataclass(frozen=True)
class Link:
    """One direction of one channel between two ranks.

    Args:
        channel: Number of the channel; NCCL splits a message over all of them.
        source, target: Ranks.
        transport: "P2P" (GPU to GPU), "SHM" (through host memory), or "NET/Socket", "NET/IB", ... (through the network).
        detail: The transport as printed: "P2P/CUMEM/read", "NET/IB/0/GDRDMA".
    """

    channel: int
    source: int
    target: int
    transport: str
    detail: str

    @property
    def gpu_direct(self) -> bool:
        """Whether the network card reads the GPU's memory itself (GPUDirect RDMA)."""
        return "GDRDMA" in self.detail

    @property
    def nic(self) -> int | None:
        """Which of the network devices carries it."""
        number = re.match(r"NET/[^/]+/(\d+)", self.detail)
        return int(number[1]) if number else None


@dataclass(frozen=True)
class Interface:
    """A network interface that NCCL chose: for what ("bootstrap", "NET/Socket", "NET/IB out of band"), on which host."""

    host: str
    use: str
    name: str
    address: str


@dataclass(frozen=True)
class TreeNode:
    """A rank's place in the tree of a channel: whom it sends sums up to, and from whom it takes them; None at the root."""

    channel: int
    rank: int
    up: int | None
    down: tuple[int, ...]


@dataclass
class Communicator:
    """One communicator: its ranks, the links between them, and the order in which rings and trees go round.

    Args:
        id: NCCL's `commId`, the same on all ranks; "" where the version prints none.
        size: Number of ranks.
        rings: The ranks in the order of the ring, by channel; only rank 0 prints them.
    """

    id: str
    size: int
    ranks: dict[int, Rank] = field(default_factory=dict)
    links: list[Link] = field(default_factory=list)
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
        found: dict[tuple[int, int], Counter] = {}
        for link in self.links:
            found.setdefault((link.source, link.target), Counter())[link.transport] += 1
        return {pair: dict(counts) for pair, counts in sorted(found.items())}

    def transports(self, between_hosts: bool) -> set[str]:
        """The transports between hosts, or within them."""
        host = {rank: place.host for rank, place in self.ranks.items()}
        known = (link for link in self.links if link.source in host and link.target in host)
        return {
            link.transport
            for link in known
            if (host[link.source] != host[link.target]) == between_hosts
        }


@dataclass
class NcclLog:
    """All that was read.

    Args:
        version: Of NCCL, "2.21.5"; cuda: the version it was built for.
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
                "no communicator in this log: run with NCCL_DEBUG=INFO, on GPUs (gloo writes no such log)"
            )
        return max(self.communicators, key=lambda comm: (comm.size, len(comm.links)))


def read(path: str | Path) -> NcclLog:
    """The log in a file; see `parse`."""
    return parse(Path(path).read_text(encoding="utf-8", errors="replace"))


def parse(text: str) -> NcclLog:
    """The log of one rank, or of many whose lines are mixed; other lines are passed over, and so are those cut short."""
    reader = _Reader()
    for line in text.splitlines():
        reader.line(line)
    return reader.finish()


class _Reader:
    """Goes through the lines once; keeps which thread works for which communicator."""

    def __init__(self):
        self.log = NcclLog()
        self.by_id: dict[str, Communicator] = {}
        self.of_thread: dict[
            tuple, Communicator
        ] = {}  # (host, pid, tid), and (host, pid) for its latest
        self.seen: set[tuple] = set()

    def line(self, line):
        version = _VERSION.search(line)  # printed without host and process by some versions
        if version and not self.log.version:
            self.log.version, self.log.cuda = version[1], version[2]
        found = _LINE.search(line)
        if not found:
            return
        if found["kind"] == "WARN":
            self.log.warnings.append((found["host"], found["text"].strip()))
        elif found["kind"] == "INFO":
            self._info(found, found["text"].strip())

    def _info(self, line, text):
        self._network(line["host"], text)
        comm = _COMM.search(text)
        if comm:
            self._member(line, text, comm)
        elif link := _LINK.match(text):
            self._link(line, link)
        elif order := _ORDER.match(text):
            self._comm(line).rings[int(order[1])] = tuple(map(int, order[2].split()))
        elif text.startswith("Trees"):
            # up to 2.6 a tree is printed twice, "down->me->up|up->me->down": the first half counts
            for channel, *below, rank, up in (map(int, tree) for tree in _TREE.findall(text)):
                down = tuple(child for child in below if child >= 0)
                self._comm(line).trees.append(
                    TreeNode(channel, rank, up if up >= 0 else None, down)
                )

    def _network(self, host, text):
        log = self.log
        for pattern, use in ((_BOOTSTRAP, "bootstrap"), (_OUT_OF_BAND, "NET/IB out of band")):
            for name, address in pattern.findall(text):
                self._add(log.interfaces, Interface(host, use, name, address))
        if text.startswith("NET/Socket : Using"):
            for name, address in _SOCKET.findall(text):
                self._add(log.interfaces, Interface(host, "NET/Socket", name, address))
        elif text.startswith("NET/IB : Using"):
            log.nics[host] = [
                (name, kind or "IB") for name, kind in _NIC.findall(text.split("OOB")[0])
            ]
        elif network := re.match(r"Using network (.+)", text):
            log.networks[host] = network[1]
        elif setting := _SET.search(text):
            log.settings[setting[1]] = setting[2]

    def _member(self, line, text, comm):
        rank, size = int(comm[2]), int(comm[3])
        more = {
            name: (found[1] if (found := pattern.search(text)) else None)
            for name, pattern in _FIELDS.items()
        }
        thread = (line["host"], line["pid"], line["tid"])
        known = self.of_thread.get(thread)
        if more["commId"]:
            own = self.by_id.setdefault(more["commId"], Communicator(more["commId"], size))
        elif (
            known
            and known.size == size
            and known.ranks.get(rank, Rank(rank, line["host"])).host == line["host"]
        ):
            own = known  # this line says less than the first about the same communicator
        else:  # old versions print no commId: the ranks of one size are one communicator
            own = self.by_id.setdefault(f"of {size}", Communicator("", size))
        self.of_thread[thread] = self.of_thread[thread[:2]] = own
        before = own.ranks.get(rank)
        gpu = int(more["cudaDev"]) if more["cudaDev"] else (before.gpu if before else None)
        bus_id = more["busId"] or (before.bus_id if before else None)
        own.ranks[rank] = Rank(rank, line["host"], gpu, bus_id, int(line["pid"]))

    def _comm(self, line) -> Communicator:
        """The communicator that the line's thread works for; versions before 2.8 name it only when its set-up ends."""
        thread = (line["host"], line["pid"], line["tid"])
        for key in (thread, thread[:2]):
            if key in self.of_thread:
                return self.of_thread[key]
        return self.by_id.setdefault("", Communicator("", 0))

    def _link(self, line, found):
        channel, source, source_gpu, target, target_gpu, way, detail = found.groups()
        own, source, target = self._comm(line), int(source), int(target)
        detail = {"direct shared memory": "SHM/direct"}.get(detail.strip(), detail.strip())
        parts = detail.split("/")
        transport = "/".join(parts[:2]) if parts[0] == "NET" else parts[0]
        # both ends print a link through the network: it is one link
        self._add(
            own.links,
            Link(int(channel), source, target, transport, detail),
            (id(own), channel, source, target),
        )
        here, place = (target, target_gpu) if way == "receive" else (source, source_gpu)
        if here not in own.ranks:
            is_bus = place is not None and len(place) > 3  # "7000" is a bus, "0" a GPU
            gpu = int(place) if place and not is_bus and place.isdigit() else None
            own.ranks[here] = Rank(
                here, line["host"], gpu, place if is_bus else None, int(line["pid"])
            )

    def _add(self, items, item, key=None):
        key = key or item
        if key not in self.seen:
            self.seen.add(key)
            items.append(item)

    def finish(self) -> NcclLog:
        nameless = self.by_id.pop("", None)
        if nameless:
            self._settle(nameless)
        self.log.communicators = list(self.by_id.values())
        return self.log

    def _settle(self, nameless):
        """Give what was printed before any communicator had a name to the largest of them, or keep it as one of its own."""
        own = max(self.by_id.values(), key=lambda comm: comm.size, default=None)
        if own is None:
            self.by_id["?"] = nameless
            nameless.size = (
                max((*nameless.ranks, *(link.target for link in nameless.links)), default=-1) + 1
            )
            return
        own.links, own.trees, own.rings = (
            own.links + nameless.links,
            own.trees + nameless.trees,
            own.rings | nameless.rings,
        )
        own.ranks = nameless.ranks | own.ranks
