"""The network between the hosts: a bridge on the head, and one cable (a veth pair) to each node."""

import re
import subprocess
from collections.abc import Sequence

from labcode.minislurm.hosts import Host
from labcode.minislurm.needs import CLEAN, rootless
from labcode.minislurm.spec import Spec

_RATE = re.compile(r"(?P<number>\d+(\.\d+)?)(?P<scale>[kmg]?)bit")
_SCALE = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
_PORTS = re.compile(r"\d{1,5}(-\d{1,5})?")
# A burst of 5 ms of the rate keeps the average rate exact at any timer frequency of the kernel.
_BURST_S = 0.005
_MIN_BURST_BYTES = 70_000  # above one segment of 64 KiB, or nothing would ever pass
_QUEUE_BYTES = 8_000_000  # what a sender may have in flight before frames are dropped


def lay_bridge(head: Host, spec: Spec) -> None:
    """Make the switch that all cables end in, and give the head its address."""
    address = spec.addresses()["head"]
    _batch(
        head,
        "ip",
        [
            "link set lo up",
            "link add br0 type bridge",
            f"addr add {address}/24 dev br0",
            "link set br0 up",
        ],
    )


def lay_cable(head: Host, node: Host, spec: Spec) -> None:
    """Connect a node: its end is eth0, the end on the head has the node's name.

    Beside eth0 the node has docker0, which leads nowhere. Machines with Docker have it too, all of
    them with the same address, and a library that picks it cannot reach its peers.
    """
    unplug(head, node)
    address = spec.addresses()[node.name]
    # The address of the card is fixed, because the peers remember it while the node boots.
    mac = _mac(address)
    _batch(
        head,
        "ip",
        [
            f"link add {node.name} type veth peer name eth0 address {mac} netns {node.pid}",
            f"link set {node.name} master br0 up",
        ],
    )
    _batch(
        node,
        "ip",
        [
            "link set lo up",
            f"addr add {address}/24 dev eth0",
            "link set eth0 up",
            "link add docker0 type bridge",
            "addr add 172.17.0.1/16 dev docker0",
            "link set docker0 up",
        ],
    )


def _mac(address: str) -> str:
    """02:00 (locally administered), then the four numbers of the IP address."""
    numbers = [2, 0, *map(int, address.split("."))]
    return ":".join(f"{number:02x}" for number in numbers)


def unplug(head: Host, node: Host) -> None:
    """Remove a node's cable; the kernel does so as well, some time after the node is gone."""
    _batch(head, "ip", [f"link del {node.name}"], check=False)


def set_link(head: Host, node: Host, up: bool) -> None:
    """Pull the cable out of the switch, or put it back."""
    state = "up" if up else "down"
    _batch(head, "ip", [f"link set {node.name} {state}"])


def slow(head: Host, node: Host, rate: str) -> None:
    """Limit a node's cable in both directions to `rate`; "off" removes the limit.

    There is no delay to set: many kernels come without sch_netem, the tool for it.

    Raises:
        ValueError: The rate is not in tc's notation.
    """
    burst = 0 if rate == "off" else _burst_bytes(rate)
    ends = ((head, node.name), (node, "eth0"))
    for host, device in ends:
        _batch(host, "tc", [f"qdisc del dev {device} root"], check=False)
        if burst:
            limit = f"rate {rate} burst {burst} limit {burst + _QUEUE_BYTES}"
            _batch(host, "tc", [f"qdisc add dev {device} root tbf {limit}"])


def _burst_bytes(rate: str) -> int:
    """How many bytes may pass at once, at a rate as tc writes it."""
    found = _RATE.fullmatch(rate)
    if not found:
        raise ValueError(f"rate {rate!r}: write it as 100mbit, 1gbit or 500kbit, or `off`")
    bits_per_s = float(found["number"]) * _SCALE[found["scale"]]
    return max(_MIN_BURST_BYTES, int(bits_per_s / 8 * _BURST_S))


def block(node: Host, port: int | str, closed: bool) -> None:
    """Close a TCP port of a node, or a range such as 20000-29999, or open it again.

    The node's answers from that port are dropped in silence, as a firewall does it.

    Raises:
        ValueError: The port is neither a number nor a range.
    """
    if not _PORTS.fullmatch(str(port)):
        raise ValueError(f"port {port!r}: give a number or a range such as 20000-29999")
    action = "add" if closed else "del"
    _batch(node, "ip", [f"rule {action} pref 1 ipproto tcp sport {port} blackhole"])


def _batch(host: Host, tool: str, lines: Sequence[str], check: bool = True) -> None:
    """Run lines of `ip` or `tc` in a host's network.

    Only the network namespace is entered, not that of the processes: a line may name a process id
    of this machine (`netns PID`).

    Raises:
        RuntimeError: With `check`, a line failed.
    """
    user = ["--user", "--preserve-credentials"] if rootless() else []
    done = subprocess.run(
        ["nsenter", "-t", str(host.pid), *user, "--net", tool, "-batch", "-"],
        input="\n".join(lines) + "\n",
        env=CLEAN,
        capture_output=True,
        text=True,
        timeout=60,
    )
    if check and done.returncode:
        reason = done.stderr.strip().splitlines()[0]
        raise RuntimeError(f"{tool} on {host.name}: {reason}")
