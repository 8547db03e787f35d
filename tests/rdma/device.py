"""What the kernel counted: packets of the RDMA device, and bytes of everything that goes by IP."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_COUNTERS = Path("/sys/class/infiniband/rxe0/ports/1/hw_counters")
# The kernel's soft-RoCE sends no more in one packet.
PACKET_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Traffic:
    """Counted since the machine's start, or between two moments."""

    rdma_packets_sent: int
    rdma_packets_received: int
    ip_bytes: int
    tcp_segments: int

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(
            self.rdma_packets_sent - earlier.rdma_packets_sent,
            self.rdma_packets_received - earlier.rdma_packets_received,
            self.ip_bytes - earlier.ip_bytes,
            self.tcp_segments - earlier.tcp_segments,
        )


def traffic() -> Traffic:
    """Now."""
    return Traffic(
        int((_COUNTERS / "sent_pkts").read_text()),
        int((_COUNTERS / "rcvd_pkts").read_text()),
        _protocol_counter("/proc/net/netstat", "IpExt:", "OutOctets"),
        _protocol_counter("/proc/net/snmp", "Tcp:", "OutSegs"),
    )


def _protocol_counter(path: str, protocol: str, name: str) -> int:
    lines = [line.split() for line in Path(path).read_text().splitlines()]
    names, values = (line for line in lines if line[0] == protocol)
    return int(values[names.index(name)])


def check_moved_by_rdma(counted: Traffic, payload_bytes: int) -> str:
    """Says how it is known that the payload went by RDMA inside one machine; AssertionError when it did not.

    Soft-RoCE inside one machine bypasses IP: fewer IP bytes than payload means that no TCP connection carried it.
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
