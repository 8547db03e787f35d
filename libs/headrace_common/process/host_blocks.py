"""Lets the kernel drop the packets of some hosts at a listening socket, before a connection exists.

A socket filter (SO_ATTACH_FILTER) needs no privilege. The kernel replaces a filter in one step.
"""

from __future__ import annotations

import ctypes
import ipaddress
import logging
import socket
import struct
import time
from collections.abc import Callable, Collection, Iterable
from typing import Final

_LOG = logging.getLogger(__name__)

HOSTS_MAX: Final = 32
"""Hosts that are blocked at once. The kernel limits the memory of filters."""

_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
# Classic BPF: load a word or a byte at a fixed offset, shift right, jump when equal, return.
_LOAD_WORD, _LOAD_BYTE, _SHIFT, _EQUAL, _RETURN = 0x20, 0x30, 0x74, 0x15, 0x06
# Offsets of the packet's IP header.
_NETWORK = 0xFFF00000
_SOURCE: Final = {4: _NETWORK + 12, 6: _NETWORK + 8}
_ADMIT, _DROP = 0xFFFFFFFF, 0
_INSTRUCTION_BYTES = 8


class HostBlocks:
    """Blocked hosts, each for `block_s`. A host is an IPv4 address or an IPv6 network of 64 bits."""

    def __init__(self, block_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._block_s = block_s
        self._clock = clock
        self._until_s: dict[str, float] = {}

    def block(self, host: str) -> bool:
        """Blocks a host from now on. False when it is blocked, or cannot be."""
        if not self._block_s or host in self._until_s or len(self._until_s) >= HOSTS_MAX:
            return False
        try:
            ipaddress.ip_network(host)
        except ValueError:
            # Such as the name of a Unix socket.
            return False
        self._until_s[host] = self._clock() + self._block_s
        return True

    def current(self) -> frozenset[str]:
        """The hosts that are blocked now."""
        now_s = self._clock()
        for host in [host for host, until_s in self._until_s.items() if until_s <= now_s]:
            del self._until_s[host]
        return frozenset(self._until_s)


def block_hosts(listeners: Iterable[socket.socket], hosts: Collection[str]) -> None:
    """Drops the packets of these hosts, and of no other, at the listening sockets."""
    program = filter_program(hosts)
    buffer = ctypes.create_string_buffer(program)
    count = len(program) // _INSTRUCTION_BYTES
    header = struct.pack("HL", count, ctypes.addressof(buffer))
    for listener in listeners:
        try:
            if hosts:
                listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, header)
            else:
                listener.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
        except OSError as error:
            _LOG.warning("the kernel cannot block hosts at a listener: %s", error)


def filter_program(hosts: Collection[str]) -> bytes:
    """A program that drops packets from these hosts."""
    networks = [ipaddress.ip_network(host) for host in hosts]
    code = b"".join(_checks(4, networks) + _checks(6, networks))
    return code + _instruction(_RETURN, value=_ADMIT)


def _checks(
    version: int, networks: Iterable[ipaddress.IPv4Network | ipaddress.IPv6Network]
) -> list[bytes]:
    """Loads the version, and for packets of this version compares the source with each network."""
    parts: list[bytes] = []
    for network in networks:
        if network.version != version:
            continue
        packed = network.network_address.packed
        words = struct.unpack("!I", packed) if version == 4 else struct.unpack("!2I", packed[:8])
        block = _instruction(_RETURN, value=_DROP)
        for place in reversed(range(len(words))):
            over = len(block) // _INSTRUCTION_BYTES
            block = _instruction(_EQUAL, 0, over, words[place]) + block
            block = _instruction(_LOAD_WORD, value=_SOURCE[version] + 4 * place) + block
        parts.append(block)
    if not parts:
        return []
    body = b"".join(parts)
    head = _instruction(_LOAD_BYTE, value=_NETWORK) + _instruction(_SHIFT, value=4)
    # A jump of classic BPF spans 255 instructions, which 32 hosts do not exceed.
    return [head + _instruction(_EQUAL, 0, len(body) // _INSTRUCTION_BYTES, version) + body]


def _instruction(code: int, if_true: int = 0, if_false: int = 0, value: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)
