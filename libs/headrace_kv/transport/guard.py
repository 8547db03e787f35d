"""Which hosts may connect to the ports of a transport: their networks, this process's sockets, and filters on these.

Mooncake opens its listening sockets on all addresses. A filter in the kernel (SO_ATTACH_FILTER) drops every packet with
another destination or source address, before the connection exists. It needs no privilege, and connections that the
socket accepts inherit it. The kernel replaces a filter in one step. Binding the
socket to an interface (SO_BINDTODEVICE) admits all addresses of the interface, and no packet to the host's address by
another interface.

A sender's kernel sends bytes again for about 100 s after the network has failed, also when the sender has ended.
Without its connection, the receiver drops them. A frozen process keeps its connections, because its kernel answers.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import ipaddress
import os
import re
import socket
import stat
import struct
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias
from urllib.parse import unquote

from headrace_common.errors import ConfigError, QueueFull

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


_FAMILIES = (socket.AF_INET, socket.AF_INET6)
# struct tcp_info: of a listening socket, tcpi_unacked counts the connections that wait for accept.
_TCP_INFO_BYTES = 28
_TCP_INFO_UNACKED = 24


@dataclass(frozen=True, slots=True)
class OwnSocket:
    """`copy` is a duplicate of the socket's descriptor: options that are set on it hold for the socket."""

    inode: int
    close_on_exec: bool
    """Whether the flag is set. Python and gRPC set it for every socket, Mooncake for none."""
    copy: socket.socket

    @property
    def listens(self) -> bool:
        return bool(self.copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))

    @property
    def local_port(self) -> int:
        return int(self.copy.getsockname()[1])

    @property
    def waiting_connections(self) -> int:
        """Connections of a listening socket that wait for accept."""
        info = self.copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        return int(struct.unpack_from("@I", info, _TCP_INFO_UNACKED)[0])


def own_tcp_sockets() -> Iterator[OwnSocket]:
    """Every TCP socket of the process. Its copy is closed when the next one is taken."""
    for entry in Path("/proc/self/fd").iterdir():
        found = _own_socket(int(entry.name))
        if found is not None:
            with found.copy:
                yield found


def _own_socket(descriptor: int) -> OwnSocket | None:
    """The socket of a descriptor, which may be closed meanwhile."""
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISSOCK(status.st_mode):
            return None
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFD)
        copy = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        return None
    if copy.family not in _FAMILIES or copy.type != socket.SOCK_STREAM:
        copy.close()
        return None
    return OwnSocket(status.st_ino, bool(flags & fcntl.FD_CLOEXEC), copy)


_MICROSECONDS = 1_000_000


def set_accept_timeout(port: int, timeout_s: float) -> bool:
    """Sets the accept timeout of this process's socket that listens on `port`. Returns whether there is one.

    The destructor of a Mooncake engine joins its handshake thread, which blocks in accept for up to a second. It holds
    Python's GIL meanwhile, so nothing else in the process runs. An accept call in progress keeps its old timeout.
    """
    seconds, microseconds = divmod(round(timeout_s * _MICROSECONDS), _MICROSECONDS)
    limit = struct.pack("@ll", seconds, microseconds)
    found = False
    for own in own_tcp_sockets():
        if own.listens and own.local_port == port:
            own.copy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            found = True
    return found


_FIRST_PROBE_S = 4
_PROBE_INTERVAL_S = 2
_PROBES = 3
LOST_AFTER_S: Final = _FIRST_PROBE_S + _PROBES * _PROBE_INTERVAL_S
"""When a silent connection ends. Shorter than decode's default quarantine_s."""


def end_lost_connections(ports: Collection[int]) -> None:
    """Makes the kernel probe the peers of connections that this process accepts on `ports` from now on."""
    options = (
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _FIRST_PROBE_S),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_INTERVAL_S),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES),
        # While an answer to the peer is not acknowledged, no probes are sent.
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_AFTER_S * 1000),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    )
    for own in own_tcp_sockets():
        if own.listens and own.local_port in ports:
            # Accepted connections inherit the options.
            for level, option, value in options:
                own.copy.setsockopt(level, option, value)


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
    found = addresses_of(host)
    if found and all(address.version == 6 for address in found):
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
    local, remote = (
        plain_address(ipaddress.ip_address(name[0].partition("%")[0]))
        for name in (own.copy.getsockname(), own.copy.getpeername())
    )
    to_here = not addresses or local in addresses
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
