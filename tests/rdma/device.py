"""Counters of the kernel: packets of the RDMA device, and bytes of all IP traffic."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

DEVICE = "rxe0"
_COUNTERS = Path(f"/sys/class/infiniband/{DEVICE}/ports/1/hw_counters")
_INTERFACES = Path("/sys/class/net")
# Soft-RoCE never sends more in one packet, and on a link with an MTU of 1,500 bytes never more than the second.
PACKET_BYTES = 4096
LINK_PACKET_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Traffic:
    """Counters since the machine's start, or between two moments.

    `ip_bytes` were sent by IP, which RDMA inside one machine does not use. With two machines, `roce_bytes` crossed
    the network of the RDMA device, `control_bytes` the other one.
    """

    rdma_packets_sent: int = 0
    rdma_packets_received: int = 0
    ip_bytes: int = 0
    roce_bytes: int = 0
    control_bytes: int = 0

    def __sub__(self, earlier: Traffic) -> Traffic:
        names = (field.name for field in fields(self))
        return Traffic(**{name: getattr(self, name) - getattr(earlier, name) for name in names})


def traffic() -> Traffic:
    """Reads the counters now."""
    return Traffic(
        rdma_packets_sent=int((_COUNTERS / "sent_pkts").read_text()),
        rdma_packets_received=int((_COUNTERS / "rcvd_pkts").read_text()),
        ip_bytes=protocol_counter(Path("/proc/net/netstat").read_text(), "IpExt:", "OutOctets"),
        roce_bytes=_interface_bytes("eth1"),
        control_bytes=_interface_bytes("eth0"),
    )


def protocol_counter(text: str, protocol: str, name: str) -> int:
    """Reads a counter of the kernel's tables: for each protocol a line of names, then one of values."""
    lines = [line.split() for line in text.splitlines()]
    names, values = (line for line in lines if line and line[0] == protocol)
    return int(values[names.index(name)])


def _interface_bytes(interface: str) -> int:
    """Bytes in both directions. 0 where the interface does not exist."""
    folder = _INTERFACES / interface / "statistics"
    return sum(int(path.read_text()) for path in folder.glob("[rt]x_bytes"))


def check_moved_by_rdma(counted: Traffic, payload_bytes: int) -> str:
    """Explains how the counters prove RDMA inside one machine. Raises AssertionError when they do not.

    Soft-RoCE inside one machine bypasses IP. Fewer IP bytes than payload means that no TCP connection carried it.
    """
    assert counted.rdma_packets_sent * PACKET_BYTES >= payload_bytes, (
        f"{counted.rdma_packets_sent} RDMA packets cannot hold {payload_bytes} bytes"
    )
    assert counted.ip_bytes < payload_bytes, (
        f"{counted.ip_bytes} bytes went by IP, so {payload_bytes} bytes of payload may have"
    )
    return (
        f"{payload_bytes} bytes, {counted.rdma_packets_sent} RDMA packets, "
        f"{counted.ip_bytes} bytes by IP"
    )


def check_crossed_by_rdma(counted: Traffic, payload_bytes: int, *, sends: bool) -> str:
    """The same proof between two machines, on the side that sends or receives the payload.

    TCP and RDMA have a network each. The bytes on the first are too few for the payload. The second carries no TCP,
    at least the payload, and as many packets of the RDMA device as the payload takes.
    """
    packets = counted.rdma_packets_sent if sends else counted.rdma_packets_received
    assert packets * LINK_PACKET_BYTES >= payload_bytes, (
        f"{packets} RDMA packets cannot hold {payload_bytes} bytes"
    )
    assert counted.roce_bytes >= payload_bytes, (
        f"only {counted.roce_bytes} bytes went by the RDMA device's network"
    )
    assert counted.control_bytes < payload_bytes // 2, (
        f"{counted.control_bytes} bytes went by TCP's network, of {payload_bytes} bytes of payload"
    )
    return (
        f"{payload_bytes} bytes, {packets} RDMA packets, {counted.roce_bytes} bytes by their network, "
        f"{counted.control_bytes} by TCP's"
    )
