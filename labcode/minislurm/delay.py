"""A long cable: frames wait a fixed time between two interfaces. Run on the head, as its network's owner.

    python delay.py n2 n2-far 0.005

Many kernels come without sch_netem, the usual tool for this. Frames are taken with their offload header (PACKET_VNET_HDR):
checksums and 64 KiB segments pass as they are, so that the rate limit beside it stays the narrow part. The program goes to
the background when it is ready, and ends when an interface is removed. It needs the standard library alone.
"""

import contextlib
import os
import select
import socket
import sys
import time
from collections import deque

_SOL_PACKET, _VNET_HDR, _IGNORE_OUTGOING, _ALL = (
    263,
    15,
    23,
    3,
)  # linux/if_packet.h, linux/if_ether.h
_MAX_FRAME = 10 + 14 + 65535 + 8  # offload header, Ethernet header, segment, VLAN tags
_BUFFER_BYTES = 64 << 20


def _tap(interface):
    """A socket that takes all frames which arrive at an interface and sends frames out of it."""
    tap = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    tap.setsockopt(_SOL_PACKET, _VNET_HDR, 1)
    tap.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)  # else it would take its own frames again
    for force, usual in ((33, socket.SO_RCVBUF), (32, socket.SO_SNDBUF)):
        try:
            tap.setsockopt(
                socket.SOL_SOCKET, force, _BUFFER_BYTES
            )  # SO_RCVBUFFORCE, SO_SNDBUFFORCE
        except PermissionError:  # in a user namespace; then as much as the system allows
            tap.setsockopt(socket.SOL_SOCKET, usual, _BUFFER_BYTES)
    tap.bind((interface, _ALL))
    tap.setblocking(False)
    return tap


def _take(tap, waiting, delay_s):
    """Put all frames that have arrived into the queue, each with the time at which it leaves."""
    while True:
        try:
            waiting.append((time.monotonic() + delay_s, tap.recv(_MAX_FRAME)))
        except OSError:  # nothing more for now, or the interface is down
            return


def _send(tap, waiting):
    """Send what is due; what does not fit into a full queue, or finds its interface down, is lost, as on any cable."""
    while waiting and waiting[0][0] <= time.monotonic():
        with contextlib.suppress(OSError):
            tap.send(waiting.popleft()[1])


def main(names: list[str], delay_s: float) -> None:
    """Carry frames both ways between two interfaces until one is gone."""
    taps = [_tap(name) for name in names]
    if os.fork():
        os._exit(0)
    os.setsid()
    queues = [deque(), deque()]
    looked = 0.0
    while True:
        now = time.monotonic()
        if now - looked > 0.5:
            looked = now
            if not set(names) <= {name for _, name in socket.if_nameindex()}:
                return
        due = min((queue[0][0] for queue in queues if queue), default=now + 1)
        select.select(taps, [], [], min(max(0.0, due - now), 1.0))
        for i in (0, 1):
            _take(taps[i], queues[i], delay_s)
            _send(taps[1 - i], queues[i])


if __name__ == "__main__":
    main(sys.argv[1:3], float(sys.argv[3]))
