"""What one line of NCCL's log says, in the forms that its versions print.

    line = read_line("gpu01:700:900 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/IPC")
    line.says          # [Connected(channel=0, source=0, target=1, ...)]

A line is `host:process:thread [GPU] NCCL INFO ...`, whatever a launcher wrote before it.

Source: docs.nvidia.com/deeplearning/nccl/user-guide, NCCL_DEBUG; lines of NCCL 2.4 to 2.28 in the
issues of github.com/NVIDIA/nccl.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from labcode.slurm.log.lines import NCCL

_VERSION = re.compile(r"[NR]CCL version (\d+\.\d+(?:\.\d+)?)(?:\+cuda([\d.]+))?")
_JOINED = re.compile(r"comm 0x\w+ rank (?P<rank>\d+) n[rR]anks (?P<size>\d+)")
_GPU = re.compile(r"\bcudaDev (\d+)")
_BUS_ID = re.compile(r"\bbusId (\w+)")
_COMM_ID = re.compile(r"\bcommId (\w+)")
# Behind a rank stands its GPU, "0[1]", or in old versions the PCI bus of its GPU, "0[1a000]".
_CONNECTED = re.compile(
    r"(?:Channel|Ring) (?P<channel>\d+)(?:/\d+)? : "
    r"(?P<source>\d+)(?:\[(?P<source_gpu>\w+)\])? -> (?P<target>\d+)(?:\[(?P<target_gpu>\w+)\])?"
    r"(?: \[(?P<way>send|receive)\])?"
    r" via (?P<detail>.+?)(?: comm .*)?$"
)
_RING_ORDER = re.compile(r"Channel (?P<channel>\d+)/\d+ :(?P<ranks>(?:\s+\d+)+)\s*$")
# "[0] 1/-1/-1->0->-1": on channel 0, rank 0 has the child 1 and no parent.
_TREE = re.compile(r"\[(\d+)\] (-?\d+)/(-?\d+)/(-?\d+)->(-?\d+)->(-?\d+)")
_BOOTSTRAP = re.compile(r"Bootstrap ?: Using (?:\[\d+\])?([\w.-]+):(\S+?)<\d+>")
_SOCKET = re.compile(r"\[\d+\]([\w.-]+):(\S+?)<\d+>")
_NIC = re.compile(r"\[\d+\]([\w-]+):\d+(?:/(\w+))?")
_OUT_OF_BAND = re.compile(r"OOB ([\w.-]+):(\S+?)<\d+>")
_NETWORK = re.compile(r"Using network (.+)")
_SETTING = re.compile(r"(NCCL_\w+) set (?:by environment )?to (\S+?)\.?$")

_OLD_NAMES = {"direct shared memory": "SHM/direct"}
_LONGEST_GPU_NUMBER = 3  # "7000" is a bus, "0" is a GPU


@dataclass(frozen=True)
class Warned:
    """NCCL warns."""

    text: str


@dataclass(frozen=True)
class Joined:
    """The process is a rank of a communicator; what the line does not tell is None."""

    rank: int
    size: int
    comm_id: str | None
    gpu: int | None
    bus_id: str | None


@dataclass(frozen=True)
class Connected:
    """A rank is connected to another one, over one channel.

    Args:
        channel: Number of the channel.
        source, target: Ranks.
        detail: The transport as printed: "P2P/CUMEM/read".
        own_rank: The end that prints the line.
        gpu, bus_id: GPU number and PCI bus id of that end; a version prints one of them, or
            neither.
    """

    channel: int
    source: int
    target: int
    detail: str
    own_rank: int
    gpu: int | None
    bus_id: str | None


@dataclass(frozen=True)
class RingOrder:
    """The ranks in the order of a channel's ring."""

    channel: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class TreePlace:
    """The neighbours of a rank in a channel's tree; the root has no `up`."""

    channel: int
    rank: int
    up: int | None
    down: tuple[int, ...]


@dataclass(frozen=True)
class ChoseInterface:
    """NCCL uses a network interface, for "bootstrap", "NET/Socket" or "NET/IB out of band"."""

    use: str
    name: str
    address: str


@dataclass(frozen=True)
class FoundNics:
    """The RDMA devices of the host: ("mlx5_0", "IB" or "RoCE")."""

    nics: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class ChoseNetwork:
    """The network between hosts: "IB", "Socket", or the name of a plugin."""

    name: str


@dataclass(frozen=True)
class FoundSetting:
    """An environment variable of NCCL is set."""

    name: str
    value: str


Event = (
    Warned
    | Joined
    | Connected
    | RingOrder
    | TreePlace
    | ChoseInterface
    | FoundNics
    | ChoseNetwork
    | FoundSetting
)


@dataclass(frozen=True)
class Line:
    """One line: who wrote it, and what it says."""

    host: str
    pid: int
    thread: int
    says: tuple[Event, ...]


def read_line(line: str) -> Line | None:
    """What a line says, None if it is not NCCL's; a line cut short says what is left of it."""
    found = NCCL.search(line)
    if not found:
        return None
    text = found["text"].strip()
    says: list[Event] = []
    if found["kind"] == "WARN":
        says.append(Warned(text))
    elif found["kind"] == "INFO":
        says += _network_events(text)
        says += _rank_events(text)
    return Line(found["host"], int(found["pid"]), int(found["thread"]), tuple(says))


def read_version(line: str) -> tuple[str, str | None] | None:
    """(version of NCCL, version of CUDA that it was built for), if the line names them.

    Some versions print it without host and process, so it is no part of `Line`.
    """
    found = _VERSION.search(line)
    return (found[1], found[2]) if found else None


# ---- what the host uses


def _network_events(text: str) -> Iterator[Event]:
    for name, address in _BOOTSTRAP.findall(text):
        yield ChoseInterface("bootstrap", name, address)
    for name, address in _OUT_OF_BAND.findall(text):
        yield ChoseInterface("NET/IB out of band", name, address)
    if text.startswith("NET/Socket : Using"):
        for name, address in _SOCKET.findall(text):
            yield ChoseInterface("NET/Socket", name, address)
    elif text.startswith("NET/IB : Using"):
        # Behind "OOB" stands an interface in the same form as a device.
        devices = _NIC.findall(text.partition("OOB")[0])
        yield FoundNics(tuple((name, kind or "IB") for name, kind in devices))
    elif network := _NETWORK.match(text):
        yield ChoseNetwork(network[1])
    elif setting := _SETTING.search(text):
        yield FoundSetting(setting[1], setting[2])


# ---- what a rank does


def _rank_events(text: str) -> Iterator[Event]:
    if joined := _JOINED.search(text):
        yield _joined(joined, text)
    elif connected := _CONNECTED.match(text):
        yield _connected(connected)
    elif order := _RING_ORDER.match(text):
        ranks = tuple(map(int, order["ranks"].split()))
        yield RingOrder(int(order["channel"]), ranks)
    elif text.startswith("Trees"):
        # Up to 2.6 a tree is printed twice, "down->me->up|up->me->down": only the first half has
        # the number of the channel in front, so only that one matches.
        for numbers in _TREE.findall(text):
            yield _tree_place(*map(int, numbers))


def _joined(found: re.Match[str], text: str) -> Joined:
    gpu = _first(_GPU, text)
    return Joined(
        rank=int(found["rank"]),
        size=int(found["size"]),
        comm_id=_first(_COMM_ID, text),
        gpu=int(gpu) if gpu else None,
        bus_id=_first(_BUS_ID, text),
    )


def _first(pattern: re.Pattern[str], text: str) -> str | None:
    found = pattern.search(text)
    return found[1] if found else None


def _connected(found: re.Match[str]) -> Connected:
    own = "target" if found["way"] == "receive" else "source"
    gpu, bus_id = _gpu_or_bus(found[f"{own}_gpu"])
    detail = found["detail"].strip()
    return Connected(
        channel=int(found["channel"]),
        source=int(found["source"]),
        target=int(found["target"]),
        detail=_OLD_NAMES.get(detail, detail),
        own_rank=int(found[own]),
        gpu=gpu,
        bus_id=bus_id,
    )


def _gpu_or_bus(text: str | None) -> tuple[int | None, str | None]:
    """What stands in brackets behind a rank: a GPU's number, or in old versions its PCI bus."""
    if text is None:
        return None, None
    if len(text) > _LONGEST_GPU_NUMBER:
        return None, text
    return (int(text) if text.isdigit() else None), None


def _tree_place(channel: int, a: int, b: int, c: int, rank: int, up: int) -> TreePlace:
    """-1 stands where there is nobody."""
    down = tuple(child for child in (a, b, c) if child >= 0)
    return TreePlace(channel, rank, up if up >= 0 else None, down)
