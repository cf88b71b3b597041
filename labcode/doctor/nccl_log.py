"""Who talks to whom over what: the log that NCCL writes with NCCL_DEBUG=INFO, read as plain data.

    log = read("train-17.out")          # or parse(text), with the lines of all ranks mixed
    log.main.pairs()                    # {(0, 1): {"P2P": 2}, (1, 2): {"NET/Socket": 2}, ...}

`pairs` tells for each pair of ranks the transports, and how many channels use each. A job makes
several communicators, one for each group of the grid; a rank is a number within one of them, and
`main` is the largest.

    nccl_lines   what one line says
    nccl_graph   ranks, links, communicators
    nccl_log     from the lines to the communicators
"""

from pathlib import Path

from labcode.doctor.nccl_graph import (
    Communicator,
    Interface,
    NcclLink,
    NcclLog,
    Rank,
    TreeNode,
)
from labcode.doctor.nccl_lines import (
    ChoseInterface,
    ChoseNetwork,
    Connected,
    Event,
    FoundNics,
    FoundSetting,
    Joined,
    Line,
    RingOrder,
    TreePlace,
    Warned,
    read_line,
    read_version,
)

__all__ = [
    "Communicator",
    "Interface",
    "NcclLink",
    "NcclLog",
    "Rank",
    "TreeNode",
    "parse",
    "read",
]


def read(path: str | Path) -> NcclLog:
    """The log in a file; see `parse`."""
    return parse(Path(path).read_text(encoding="utf-8", errors="replace"))


def parse(text: str) -> NcclLog:
    """The log of one rank, or of many whose lines are mixed.

    Lines of others are skipped, and so are those that were cut short.
    """
    builder = _Builder()
    for line in text.splitlines():
        builder.add(line)
    return builder.finish()


class _Builder:
    """Takes the lines one by one, and keeps which thread works for which communicator.

    Only the line with which a rank joins a communicator names it. The lines that follow belong to
    the communicator that their thread has joined last. Versions before 2.8 print that line last of
    all: until then the lines go to a communicator without a name, and `finish` gives them away.
    """

    def __init__(self) -> None:
        self._log = NcclLog()
        self._named: dict[str, Communicator] = {}
        self._nameless: Communicator | None = None
        # Other threads of a process, such as NCCL's proxy, speak for the one that joined last.
        self._of_thread: dict[tuple[str, int, int], Communicator] = {}
        self._of_process: dict[tuple[str, int], Communicator] = {}
        # The keys in the order of the log; the values mean nothing.
        self._interfaces: dict[Interface, None] = {}
        self._links_seen: set[tuple[int, int, int, int]] = set()

    def add(self, text: str) -> None:
        """Take one line of the log."""
        version = read_version(text)
        if version and self._log.version is None:
            self._log.version, self._log.cuda = version
        line = read_line(text)
        if line is None:
            return
        for event in line.says:
            self._take(line, event)

    def _take(self, line: Line, event: Event) -> None:
        match event:
            case Joined():
                self._join(line, event)
            case Connected():
                self._connect(line, event)
            case RingOrder(channel, ranks):
                self._communicator_of(line).rings[channel] = ranks
            case TreePlace(channel, rank, up, down):
                self._communicator_of(line).trees.append(TreeNode(channel, rank, up, down))
            case ChoseInterface(use, name, address):
                self._interfaces[Interface(line.host, use, name, address)] = None
            case ChoseNetwork(name):
                self._log.networks[line.host] = name
            case FoundNics(nics):
                self._log.nics[line.host] = list(nics)
            case FoundSetting(name, value):
                self._log.settings[name] = value
            case Warned(text):
                self._log.warnings.append((line.host, text))

    def _join(self, line: Line, joined: Joined) -> None:
        own = self._joined_communicator(line, joined)
        self._of_thread[line.host, line.pid, line.thread] = own
        self._of_process[line.host, line.pid] = own
        # Several lines tell of the same rank, and some tell less than those before.
        before = own.ranks.get(joined.rank, Rank(joined.rank, line.host))
        own.ranks[joined.rank] = Rank(
            rank=joined.rank,
            host=line.host,
            gpu=before.gpu if joined.gpu is None else joined.gpu,
            bus_id=joined.bus_id or before.bus_id,
            pid=line.pid,
        )

    def _joined_communicator(self, line: Line, joined: Joined) -> Communicator:
        if joined.comm_id:
            new = Communicator(joined.comm_id, joined.size)
            return self._named.setdefault(joined.comm_id, new)
        current = self._of_thread.get((line.host, line.pid, line.thread))
        if current and _may_be_member(current, line, joined):
            return current
        # Old versions print no commId: the ranks of one size are one communicator.
        return self._named.setdefault(f"of {joined.size}", Communicator("", joined.size))

    def _communicator_of(self, line: Line) -> Communicator:
        """The communicator that the line's thread works for."""
        of_thread = self._of_thread.get((line.host, line.pid, line.thread))
        of_process = self._of_process.get((line.host, line.pid))
        known = of_thread or of_process
        if known:
            return known
        if self._nameless is None:
            self._nameless = Communicator("", 0)
        return self._nameless

    def _connect(self, line: Line, found: Connected) -> None:
        own = self._communicator_of(line)
        key = (id(own), found.channel, found.source, found.target)
        if key not in self._links_seen:
            self._links_seen.add(key)
            transport = _transport(found.detail)
            own.links.append(
                NcclLink(found.channel, found.source, found.target, transport, found.detail)
            )
        if found.own_rank not in own.ranks:
            rank = Rank(found.own_rank, line.host, found.gpu, found.bus_id, line.pid)
            own.ranks[found.own_rank] = rank

    def finish(self) -> NcclLog:
        """The log, when all lines have been taken."""
        if self._nameless:
            self._settle(self._nameless)
        self._log.interfaces = list(self._interfaces)
        self._log.communicators = list(self._named.values())
        return self._log

    def _settle(self, nameless: Communicator) -> None:
        """Give what was printed before any communicator had a name to the largest of them.

        If none ever got a name, it stays a communicator of its own.
        """
        if not self._named:
            targets = (link.target for link in nameless.links)
            nameless.size = max((*nameless.ranks, *targets), default=-1) + 1
            self._named["?"] = nameless
            return
        own = max(self._named.values(), key=lambda comm: comm.size)
        own.links += nameless.links
        own.trees += nameless.trees
        own.rings |= nameless.rings
        # What the named one says of a rank counts, because it says more.
        own.ranks = nameless.ranks | own.ranks


def _may_be_member(current: Communicator, line: Line, joined: Joined) -> bool:
    """Whether a line without commId can be of the communicator that its thread has joined before.

    If so, it is a later line of the same rank, which says less than the first.
    """
    if current.size != joined.size:
        return False
    known = current.ranks.get(joined.rank)
    return known is None or known.host == line.host


def _transport(detail: str) -> str:
    """The kind of a transport: "NET/IB/0/GDRDMA" -> "NET/IB", "P2P/CUMEM/read" -> "P2P"."""
    parts = detail.split("/")
    if parts[0] == "NET":
        return "/".join(parts[:2])
    return parts[0]
