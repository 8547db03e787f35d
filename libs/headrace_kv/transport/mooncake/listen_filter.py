"""Restricts Mooncake's listening sockets, which it opens on all addresses, to the host's own address.

A filter in the kernel (SO_ATTACH_FILTER) drops every packet with another destination address, before the connection
exists. It needs no privilege, and connections that the socket accepts inherit it. Binding the socket to an interface
(SO_BINDTODEVICE) admits all addresses of the interface, and no packet to the host's address by another interface.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import socket
import struct
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from headrace_common.errors import ConfigError
from headrace_kv.transport.mooncake.sockets import own_tcp_sockets

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

STARTING: Final = threading.Lock()
"""Held from `open_listeners` to `restrict_listeners`: the listeners that appear meanwhile are one engine's."""

_SO_ATTACH_FILTER = 26
# Classic BPF: load a word or a byte at a fixed offset, shift right, jump when equal, return.
_LOAD_WORD, _LOAD_BYTE, _SHIFT, _EQUAL, _RETURN = 0x20, 0x30, 0x74, 0x15, 0x06
# Offsets of the packet's IP header, and of ancillary data.
_NETWORK = 0xFFF00000
_INTERFACE = 0xFFFFF000 + 8
_DESTINATION: Final = {4: _NETWORK + 16, 6: _NETWORK + 24}
_ADMIT, _DROP = 0xFFFFFFFF, 0
_ADDRESSES_MAX = 8
_ACCEPT_TIMEOUT_S = 1.0
_ACCEPT_POLL_S = 0.001


@dataclass(frozen=True, slots=True)
class RestrictedPorts:
    """The ports of an engine's listeners: those with a filter, and those that every address reaches."""

    filtered: frozenset[int]
    open: frozenset[int]


def resolve_host(host: str) -> tuple[Address, ...]:
    """The addresses of this machine that `host` names: empty when none is known.

    Raises ConfigError for a host that has IPv6 addresses only: Mooncake resolves the IPv4 addresses of its peers.
    """
    try:
        rows = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    found = {ipaddress.ip_address(str(row[4][0]).partition("%")[0]) for row in rows}
    if all(address.version == 6 for address in found):
        raise ConfigError(
            f"KV over Mooncake needs an IPv4 address, and {host} has IPv6 addresses only: advertise an IPv4 address, "
            "or set transport to same_host where all workers are on one host"
        )
    return tuple(sorted(filter(_is_local, found), key=str)[:_ADDRESSES_MAX])


def open_listeners() -> frozenset[int]:
    """The inodes of the process's listening sockets."""
    return frozenset(own.inode for own in own_tcp_sockets() if own.listens)


def restrict_listeners(known: Collection[int], addresses: Collection[Address]) -> RestrictedPorts:
    """Makes Mooncake's listeners that are not `known` drop packets to other addresses.

    Also ends the connections to other addresses that they have accepted already. Without addresses, nothing is
    restricted.
    """
    program = filter_program(addresses)
    filtered, unfiltered = set[int](), set[int]()
    for own in own_tcp_sockets():
        if own.close_on_exec or own.inode in known or not own.listens:
            continue
        attached = bool(addresses) and _attach(own.copy, program)
        (filtered if attached else unfiltered).add(own.local_port)
    if filtered:
        _end_connections(filtered, addresses)
    return RestrictedPorts(frozenset(filtered), frozenset(unfiltered))


def filter_program(addresses: Collection[Address]) -> bytes:
    """A program of classic BPF that admits packets to `addresses`.

    A loopback address is admitted on the loopback interface only: with the kernel's setting route_localnet, packets to
    it can come from other hosts.
    """
    code = b""
    for address in addresses:
        words = struct.unpack(f"!{len(address.packed) // 4}I", address.packed)
        checks = [(_LOAD_BYTE, _NETWORK), (_SHIFT, 4), (_EQUAL, address.version)]
        for number, word in enumerate(words):
            checks += [(_LOAD_WORD, _DESTINATION[address.version] + 4 * number), (_EQUAL, word)]
        if address.is_loopback:
            checks += [(_LOAD_WORD, _INTERFACE), (_EQUAL, socket.if_nametoindex("lo"))]
        # A check that fails continues behind this address's code.
        for position, (operation, operand) in enumerate(checks):
            failed = len(checks) - position if operation == _EQUAL else 0
            code += struct.pack("@HBBI", operation, 0, failed, operand)
        code += struct.pack("@HBBI", _RETURN, 0, 0, _ADMIT)
    return code + struct.pack("@HBBI", _RETURN, 0, 0, _DROP)


def _attach(listener: socket.socket, program: bytes) -> bool:
    """Whether the kernel accepts the program."""
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
    try:
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, header)
    except OSError:
        return False
    return True


def _end_connections(ports: Collection[int], addresses: Collection[Address]) -> None:
    """Ends connections to other addresses that were made before the filter."""
    admitted = {str(address) for address in addresses}
    end_s = time.monotonic() + _ACCEPT_TIMEOUT_S
    while _waiting_connections(ports) and time.monotonic() < end_s:
        time.sleep(_ACCEPT_POLL_S)
    for own in own_tcp_sockets():
        if not own.listens and own.local_port in ports and own.local_address not in admitted:
            with contextlib.suppress(OSError):
                own.copy.shutdown(socket.SHUT_RDWR)


def _waiting_connections(ports: Collection[int]) -> int:
    return sum(
        own.waiting_connections
        for own in own_tcp_sockets()
        if own.listens and own.local_port in ports
    )


def _is_local(address: Address) -> bool:
    """Whether packets to `address` arrive at this machine."""
    if address.is_unspecified:
        return False
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((str(address), 0))
        except OSError:
            return False
    return True
