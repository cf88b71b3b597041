"""What NCCL's log says of a job, in sentences: hosts, links, transports, settings.

    NCCL 2.21.5 for CUDA 12.4: 4 ranks on 2 hosts
        gpu01: ranks 0 and 1, by hsn0 10.0.0.1; network IB; cards mlx5_0 (IB), mlx5_1 (RoCE)
    Inside a host ranks talk over P2P (GPU to GPU, over NVLink or PCIe).
    Between hosts ranks talk over NET/IB (InfiniBand or RoCE), and cards read the GPUs' memory.

Source: the transports' names are in NCCL's src/transport/p2p.cc, shm.cc and net.cc, 2.30.
Held by: tests/unit/test_nccl_story.py
"""

from collections.abc import Iterable, Mapping

from labcode.doctor.nccl_graph import Communicator, NcclLog
from labcode.runtime.units import listed, plural, ranks_text
from labcode.slurm.variables import Where, judge

IN = "    "
WAYS = {
    "P2P": "GPU to GPU, over NVLink or PCIe",
    "SHM": "through the memory of the host, slower than P2P",
    "NET/IB": "InfiniBand or RoCE",
    "NET/Socket": "TCP, several times slower than InfiniBand",
}
DIRECT = "GDRDMA"
MOST_HOSTS = 8


def tell(log: NcclLog) -> list[str]:
    """The lines to print.

    Args:
        log: What `nccl_log.parse` has read.
    """
    version = f"NCCL {log.version or 'of an unknown version'}"
    if log.cuda:
        version += f" for CUDA {log.cuda}"
    if not log.communicators:
        named = [one.host for one in log.interfaces] + [*log.networks, *log.nics]
        return [f"{version}: no communicator was made", *_hosts(log, {host: [] for host in named})]
    comm = log.main
    lines = [f"{version}: {_counts(comm)}", *_hosts(log, comm.hosts)]
    if len(log.communicators) > 1:
        sizes = sorted((one.size for one in log.communicators), reverse=True)
        many = len(log.communicators)
        lines.append(f"{many} communicators, of {listed(list(map(str, sizes[:8])))} ranks.")
    missing = comm.size - len(comm.ranks)
    if missing > 0:
        absent = sorted(set(range(comm.size)) - set(comm.ranks))
        lines.append(f"Of {ranks_text(absent)} these files say nothing.")
    lines += _links(comm)
    lines += _settings(log, comm)
    return lines


def _counts(comm: Communicator) -> str:
    return f"{plural(comm.size, 'rank')} on {plural(len(comm.hosts), 'host')}"


def _hosts(log: NcclLog, ranks_of: Mapping[str, list[int]]) -> list[str]:
    """One line for each host, of whose ranks nothing may be known."""
    lines = []
    for host, ranks in ranks_of.items():
        own = [one for one in log.interfaces if one.host == host]
        chosen = dict.fromkeys(f"{one.name} {one.address}" for one in own)
        who = [ranks_text(ranks)] if ranks else []
        if chosen:
            who.append(f"by {', '.join(chosen)}")
        parts = [", ".join(who)] if who else []
        if host in log.networks:
            parts.append(f"network {log.networks[host]}")
        if log.nics.get(host):
            cards = ", ".join(f"{name} ({kind})" for name, kind in log.nics[host])
            parts.append(f"cards {cards}")
        lines.append(f"{IN}{host}: {'; '.join(parts)}")
    if len(lines) > MOST_HOSTS:
        lines[MOST_HOSTS:] = [f"{IN}and {len(lines) - MOST_HOSTS} more hosts"]
    different = set(log.networks.values())
    if len(different) > 1:
        lines.append(f"The hosts differ: some use {listed(sorted(different))}.")
    return lines


def _links(comm: Communicator) -> list[str]:
    lines = []
    for between_hosts, where in ((False, "Inside a host"), (True, "Between hosts")):
        transports = comm.transports(between_hosts)
        if not transports:
            continue
        text = f"{where} ranks talk over {_named(transports)}"
        if between_hosts and "NET/IB" in transports:
            direct = any(DIRECT in link.detail for link in comm.links)
            text += ", and cards read the GPUs' memory" if direct else ", through host memory"
        lines.append(f"{text}.")
    inside = comm.transports(between_hosts=False)
    if any(transport.startswith("NET") for transport in inside):
        lines.append("Inside a host the network is used: NVLink and shared memory are not.")
    return lines


def _named(transports: Iterable[str]) -> str:
    texts = []
    for name in sorted(transports):
        texts.append(f"{name} ({WAYS[name]})" if name in WAYS else name)
    return listed(texts)


def _settings(log: NcclLog, comm: Communicator) -> list[str]:
    """The variables that NCCL found, and what they mean together."""
    if not log.settings:
        return []
    said = ", ".join(f"{name}={value}" for name, value in sorted(log.settings.items()))
    lines = [f"Set: {said}"]
    cards: list[str] = []
    for nics in log.nics.values():
        cards += [name for name, _ in nics]
    where = Where(nodes=len(comm.hosts) or None, infiniband=cards or None)
    # that NCCL_DEBUG is not among them says nothing: NCCL does not print it
    settings = {"NCCL_DEBUG": "INFO", **log.settings}
    for meaning in judge(settings, where):
        lines.append(f"{IN}{meaning.text}: {meaning.cure}")
    return lines
