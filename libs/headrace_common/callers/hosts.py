"""The hosts of callers."""

from __future__ import annotations

import ipaddress
from functools import lru_cache
from typing import Final
from urllib.parse import unquote

# Addresses of which the host is remembered. Clients keep connections, so each has many requests.
_HOSTS_MAX: Final = 4_096


@lru_cache(maxsize=_HOSTS_MAX)
def host_of(address: str) -> str:
    """The host of an IP address. The addresses of one IPv6 network of 64 bits are one host."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        # Such as the path of a Unix socket.
        return address
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is None:
            return str(ipaddress.ip_network((ip, 64), strict=False))
        ip = ip.ipv4_mapped
    return str(ip)


def host_of_peer(peer: str) -> str:
    """The host of a peer as gRPC names it, such as "ipv4:10.0.0.7:40112"."""
    address = unquote(peer.partition(":")[2]).rpartition(":")[0]
    return host_of(address.strip("[]"))
