"""Addresses and networks of hosts that may connect to a transport. Pure, but for `addresses_of`."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable
from typing import Final, TypeAlias
from urllib.parse import unquote

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network
Networks: TypeAlias = tuple[Network, ...]

_PEER: Final = re.compile(
    r"(?:ipv4:(?P<v4>[0-9.]+)|ipv6:\[(?P<v6>[0-9A-Fa-f:.]+)(?:%[^\]]*)?\]):[0-9]+"
)
_LOOPBACK: Final = ipaddress.IPv4Address("127.0.0.1")


def parse_networks(texts: Iterable[str]) -> Networks:
    """Networks from texts such as "10.0.0.0/24" or "10.0.0.7". Raises ValueError with the remedy."""
    networks: list[Network] = []
    for text in texts:
        try:
            networks.append(ipaddress.ip_network(text))
        except ValueError as error:
            raise ValueError(
                f"{error}: give addresses or networks such as 10.0.0.0/24, separated by commas"
            ) from None
    return merge_networks(networks)


def merge_networks(networks: Iterable[Network]) -> Networks:
    """The fewest networks with the same addresses, in a fixed order."""
    given = list(networks)
    v4 = [one for one in given if isinstance(one, ipaddress.IPv4Network)]
    v6 = [one for one in given if isinstance(one, ipaddress.IPv6Network)]
    return (*ipaddress.collapse_addresses(v4), *ipaddress.collapse_addresses(v6))


def networks_of(addresses: Iterable[Address]) -> Networks:
    """One network for each address, merged where they are neighbours."""
    return merge_networks(ipaddress.ip_network(address) for address in addresses)


def plain_address(address: Address) -> Address:
    """The IPv4 form of an IPv4 address in IPv6 form, else the address itself."""
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def address_of_peer(peer: str) -> Address | None:
    """The address in gRPC's name of a peer, such as "ipv4:10.0.0.7:51234". None for a Unix socket."""
    match = _PEER.fullmatch(unquote(peer))
    if match is None:
        return None
    return plain_address(ipaddress.ip_address(match["v4"] or match["v6"]))


def with_ipv4_loopback(addresses: Iterable[Address]) -> frozenset[Address]:
    """The addresses. A host that connects by the loopback address of IPv6 also has that of IPv4."""
    found = frozenset(addresses)
    return found | {_LOOPBACK} if any(address.is_loopback for address in found) else found


def addresses_of(host: str) -> frozenset[Address]:
    """The addresses that `host` names; none when it is unknown. May block for the time of a look-up."""
    try:
        rows = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except OSError:
        return frozenset()
    return frozenset(ipaddress.ip_address(str(row[4][0]).partition("%")[0]) for row in rows)


def source_address(host: str) -> Address | None:
    """The IPv4 address from which this machine connects to `host`. None when it has no route there.

    Sends nothing. May block for the time of a look-up.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host.strip("[]"), 9))
        except OSError:
            return None
        return ipaddress.ip_address(probe.getsockname()[0])
