"""Restricts Mooncake's listening sockets, which it opens on all addresses, to the host's own address and to peers.

A filter in the kernel (SO_ATTACH_FILTER) drops every packet with another destination or source address, before the
connection exists. It needs no privilege, and connections that the socket accepts inherit it. The kernel replaces a
filter in one step. Binding the socket to an interface (SO_BINDTODEVICE) admits all addresses of the interface, and no
packet to the host's address by another interface.
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

from headrace_common.errors import ConfigError, QueueFull
from headrace_kv.transport.mooncake.sockets import OwnSocket, own_tcp_sockets
from headrace_kv.transport.networks import Address, Network, Networks

STARTING: Final = threading.Lock()
"""Held from `open_listeners` to `restrict_listeners`: the listeners that appear meanwhile are one engine's."""

_SO_ATTACH_FILTER = 26
# Classic BPF: load a word or a byte at a fixed offset, shift right, mask, jump, jump when equal, return.
_LOAD_WORD, _LOAD_BYTE, _SHIFT, _MASK = 0x20, 0x30, 0x74, 0x54
_JUMP, _EQUAL, _RETURN = 0x05, 0x15, 0x06
# Offsets of the packet's IP header, and of ancillary data.
_NETWORK = 0xFFF00000
_INTERFACE = 0xFFFFF000 + 8
_SOURCE: Final = {4: _NETWORK + 12, 6: _NETWORK + 8}
_DESTINATION: Final = {4: _NETWORK + 16, 6: _NETWORK + 24}
_ADMIT, _DROP = 0xFFFFFFFF, 0
_ADDRESSES_MAX = 8
# The kernel limits a socket's filters to a memory (net.core.optmem_max) of 20 KiB or more. While it replaces a filter,
# both exist. It needs up to 32 bytes for an instruction.
_INSTRUCTIONS_MAX = 300
_INSTRUCTION_BYTES = 8
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
            f"KV over Mooncake needs an IPv4 address, and {host} has IPv6 addresses only: advertise an IPv4 address"
        )
    return tuple(sorted(filter(_is_local, found), key=str)[:_ADDRESSES_MAX])


def open_listeners() -> frozenset[int]:
    """The inodes of the process's listening sockets."""
    return frozenset(own.inode for own in own_tcp_sockets() if own.listens)


def restrict_listeners(
    known: Collection[int], addresses: Collection[Address], sources: Networks | None = None
) -> RestrictedPorts:
    """Makes Mooncake's listeners that are not `known` drop packets as `filter_program` does.

    Also ends the connections that they have accepted already and would not accept now. Without addresses and sources,
    nothing is restricted.
    """
    ports = {
        own.local_port
        for own in own_tcp_sockets()
        if own.listens and not own.close_on_exec and own.inode not in known
    }
    if not addresses and sources is None:
        return RestrictedPorts(frozenset(), frozenset(ports))
    return restrict_ports(ports, addresses, sources)


def restrict_ports(
    ports: Collection[int], addresses: Collection[Address], sources: Networks | None
) -> RestrictedPorts:
    """Replaces the filters of this process's listeners on `ports`. See filter_program.

    Ends their connections that the new filter would not admit. Raises QueueFull when there are too many sources.
    """
    program = filter_program(addresses, sources)
    if not ports:
        return RestrictedPorts(frozenset(), frozenset())
    filtered, unfiltered = set[int](), set[int]()
    for own in own_tcp_sockets():
        if own.listens and own.local_port in ports:
            (filtered if _attach(own.copy, program) else unfiltered).add(own.local_port)
    if filtered:
        _end_connections(filtered, addresses, sources)
    return RestrictedPorts(frozenset(filtered - unfiltered), frozenset(unfiltered))


def filter_program(addresses: Collection[Address], sources: Networks | None = None) -> bytes:
    """A program of classic BPF that admits packets to `addresses` from `sources`.

    No addresses admit packets to any address; None as sources admits every source. A loopback address is admitted on
    the loopback interface only: with the kernel's setting route_localnet, packets to it can come from other hosts.
    Raises QueueFull when the sources need more instructions than a socket may have.
    """
    from_sources = _return(_ADMIT) if sources is None else _source_code(sources)
    if not addresses:
        return _bounded(from_sources, sources)
    code = _return(_DROP)
    # From the last block to the first: each jumps over those behind it.
    for address in reversed(list(addresses)):
        code = _block(_destination_checks(address), _jump(code)) + code
    return _bounded(code + from_sources, sources)


def _bounded(program: bytes, sources: Networks | None) -> bytes:
    if len(program) > _INSTRUCTIONS_MAX * _INSTRUCTION_BYTES:
        raise QueueFull(
            f"{len(sources or ())} networks of transfer peers are more than a socket filter holds: set "
            "transfer_peer_networks to a network that contains them",
            metadata={"networks": str(len(sources or ()))},
        )
    return program


_Checks = list[tuple[int, int]]


def _destination_checks(address: Address) -> _Checks:
    checks = _version_checks(address.version)
    for offset, word in enumerate(_words(address)):
        checks += [(_LOAD_WORD, _DESTINATION[address.version] + 4 * offset), (_EQUAL, word)]
    if address.is_loopback:
        checks += [(_LOAD_WORD, _INTERFACE), (_EQUAL, socket.if_nametoindex("lo"))]
    return checks


def _source_code(sources: Networks) -> bytes:
    """Code that admits packets from `sources` and drops all others. It checks the version once for many networks."""
    code = b""
    for version in (4, 6):
        networks = [network for network in sources if network.version == version]
        admitted = (_block(_source_checks(network), _return(_ADMIT)) for network in networks)
        section = b"".join((*admitted, _return(_DROP)))
        # The check that succeeds skips the jump over this section.
        version_check = struct.pack("@HBBI", _EQUAL, 1, 0, version)
        load = _block(_version_checks(version)[:-1], version_check)
        code += load + _jump(section) + section
    return code + _return(_DROP)


def _source_checks(network: Network) -> _Checks:
    checks: _Checks = []
    pairs = zip(_words(network.network_address), _words(network.netmask), strict=True)
    for offset, (word, mask) in enumerate(pairs):
        if mask == 0:
            continue
        checks.append((_LOAD_WORD, _SOURCE[network.version] + 4 * offset))
        if mask != 0xFFFFFFFF:
            checks.append((_MASK, mask))
        checks.append((_EQUAL, word))
    return checks


def _version_checks(version: int) -> _Checks:
    return [(_LOAD_BYTE, _NETWORK), (_SHIFT, 4), (_EQUAL, version)]


def _words(address: Address) -> tuple[int, ...]:
    return struct.unpack(f"!{len(address.packed) // 4}I", address.packed)


def _block(checks: _Checks, then: bytes) -> bytes:
    """Code that runs `then`, one instruction, when all checks succeed, and else continues behind it."""
    code = b""
    for position, (operation, operand) in enumerate(checks):
        failed = len(checks) - position if operation == _EQUAL else 0
        code += struct.pack("@HBBI", operation, 0, failed, operand)
    return code + then


def _jump(over: bytes) -> bytes:
    return struct.pack("@HBBI", _JUMP, 0, 0, len(over) // _INSTRUCTION_BYTES)


def _return(value: int) -> bytes:
    return struct.pack("@HBBI", _RETURN, 0, 0, value)


def _attach(listener: socket.socket, program: bytes) -> bool:
    """Whether the kernel accepts the program."""
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
    try:
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, header)
    except OSError:
        return False
    return True


def _end_connections(
    ports: Collection[int], addresses: Collection[Address], sources: Networks | None
) -> None:
    """Ends connections that were made before the filter, which would drop their packets."""
    end_s = time.monotonic() + _ACCEPT_TIMEOUT_S
    while _waiting_connections(ports) and time.monotonic() < end_s:
        time.sleep(_ACCEPT_POLL_S)
    for own in own_tcp_sockets():
        if own.listens or own.local_port not in ports:
            continue
        with contextlib.suppress(OSError):
            if not _admitted(own, addresses, sources):
                own.copy.shutdown(socket.SHUT_RDWR)


def _admitted(own: OwnSocket, addresses: Collection[Address], sources: Networks | None) -> bool:
    """Raises OSError when the connection has ended."""
    to_here = not addresses or ipaddress.ip_address(own.local_address) in addresses
    remote = ipaddress.ip_address(own.remote_address)
    return to_here and (sources is None or any(remote in network for network in sources))


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
