"""Which addresses other hosts cannot reach."""

from __future__ import annotations

import ipaddress


def is_loopback(address: str) -> bool:
    """Whether "host:port" or a host is on the loopback interface. A name other than localhost is not."""
    host = address.rpartition(":")[0] if address.count(":") == 1 or "]:" in address else address
    host = host.strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
