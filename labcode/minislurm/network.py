"""The network between the hosts: a bridge in the head's namespace, one cable (a veth pair) to each node."""

import re
import subprocess
import sys
from pathlib import Path

from labcode.minislurm.conf import Spec
from labcode.minislurm.hosts import Host
from labcode.minislurm.needs import CLEAN, rootless

_RATE = re.compile(r"\d+(\.\d+)?(k|m|g)?bit")
_DELAY = re.compile(r"\d+(\.\d+)?(us|ms|s)")


def _batch(host: Host, tool: str, lines, check=True) -> str:
    """Run lines of `ip` or `tc` in a host's network, seen from outside, where process ids are the machine's."""
    user = ["--user", "--preserve-credentials"] if rootless() else []
    command = ["nsenter", "-t", str(host.pid), *user, "--net", tool, "-batch", "-"]
    done = subprocess.run(
        command,
        input="\n".join(lines) + "\n",
        env=CLEAN,
        capture_output=True,
        text=True,
        timeout=60,
    )
    if check and done.returncode:
        raise RuntimeError(f"{tool} on {host.name}: {done.stderr.strip().splitlines()[0]}")
    return done.stdout + done.stderr


def lay_bridge(head: Host, spec: Spec) -> None:
    """The switch that all cables end in, and the head's own address."""
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
    """Connect a node: eth0 there, an end of the node's name on the head; beside it docker0, which leads nowhere.

    Machines with Docker have the latter, all with the same address: a library that picks it cannot reach its peers.
    """
    unplug(head, node)
    address = spec.addresses()[node.name]
    mac = ":".join(
        f"{byte:02x}" for byte in (2, 0, *map(int, address.split(".")))
    )  # peers remember it over a boot
    pair = f"link add {node.name} type veth peer name eth0 address {mac} netns {node.pid}"
    _batch(head, "ip", [pair, f"link set {node.name} master br0 up"])
    eth0 = ["link set lo up", f"addr add {address}/24 dev eth0", "link set eth0 up"]
    docker0 = [
        "link add docker0 type bridge",
        "addr add 172.17.0.1/16 dev docker0",
        "link set docker0 up",
    ]
    _batch(node, "ip", eth0 + docker0)


def unplug(head: Host, node: Host) -> None:
    """Remove a node's cable; the kernel does so as well, a while after the node is gone."""
    for link in (node.name, f"{node.name}-far"):
        _batch(head, "ip", [f"link del {link}"], check=False)


def set_link(head: Host, node: Host, up: bool) -> None:
    """Pull the cable out of the switch, or put it back."""
    _batch(head, "ip", [f"link set {node.name} {'up' if up else 'down'}"])


def slow(head: Host, node: Host, rate: str, delay: str | None) -> None:
    """Limit a node's cable in both directions to `rate`, with `delay` each way; rate "off" undoes it.

    Raises:
        ValueError: Rate or delay is not in tc's notation.
    """
    if rate != "off" and not _RATE.fullmatch(rate):
        raise ValueError(f"rate {rate!r}: write it as 100mbit, 1gbit or 500kbit, or `off`")
    if delay is not None and not _DELAY.fullmatch(delay):
        raise ValueError(f"delay {delay!r}: write it as 5ms or 200us")
    ends = ((head, node.name), (node, "eth0"))
    for host, device in ends:
        _batch(host, "tc", [f"qdisc del dev {device} root"], check=False)
    _batch(
        head, "ip", [f"link del {node.name}-far"], check=False
    )  # the program of a delay ends with it
    _batch(head, "ip", [f"link set {node.name} promisc off master br0"])
    if rate == "off":
        return
    # A burst of 5 ms of the rate keeps the average at any timer frequency; the queue holds what a sender has in flight.
    burst = max(70_000, int(_bits_per_s(rate) / 8 * 0.005))
    for host, device in ends:
        _batch(
            host,
            "tc",
            [
                f"qdisc add dev {device} root tbf rate {rate} burst {burst} limit {burst + 8_000_000}"
            ],
        )
    if delay is not None:
        _lengthen(head, node, delay)


def _lengthen(head, node, delay):
    """Put a program that holds frames back between the node's cable and the bridge."""
    near, far, inside = node.name, f"{node.name}-far", f"{node.name}-br"
    lines = [f"link add {far} type veth peer name {inside}", f"link set {near} nomaster promisc on"]
    lines += [
        f"link set {far} addrgenmode none promisc on up",
        f"link set {inside} addrgenmode none master br0 up",
    ]
    _batch(head, "ip", lines)
    seconds = float(delay.rstrip("mus")) * {"us": 1e-6, "ms": 1e-3}.get(delay[-2:], 1.0)
    head.call(
        [sys.executable, "-I", Path(__file__).with_name("delay.py"), near, far, f"{seconds:g}"],
        root=True,
    )


def _bits_per_s(rate: str) -> float:
    number = rate.removesuffix("bit")
    scale = {"k": 1e3, "m": 1e6, "g": 1e9}.get(number[-1], 1.0)
    return float(number.rstrip("kmg")) * scale


def block(node: Host, port: str, closed: bool) -> None:
    """Let nobody reach a TCP port, or a range such as 20000-29999, of a node: its answers are dropped, as by a firewall.

    Raises:
        ValueError: The port is no number or range.
    """
    if not re.fullmatch(r"\d{1,5}(-\d{1,5})?", str(port)):
        raise ValueError(f"port {port!r}: give a number or a range such as 20000-29999")
    rule = f"pref 1 ipproto tcp sport {port} blackhole"
    _batch(node, "ip", [f"rule add {rule}" if closed else f"rule del {rule}"])
