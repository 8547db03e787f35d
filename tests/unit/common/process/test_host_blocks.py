"""Blocked hosts cannot connect to a listener, and others can."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from headrace_common.process.host_blocks import HOSTS_MAX, HostBlocks, block_hosts

_DROPPED_S = 0.3
_ADMITTED_S = 30.0


@contextmanager
def listening(family: socket.AddressFamily, address: str) -> Iterator[socket.socket]:
    with socket.socket(family) as listener:
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            listener.bind((address, 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
        listener.listen(64)
        yield listener


def connects(listener: socket.socket, target: str, source: str, wait_s: float) -> bool:
    try:
        address = (target, listener.getsockname()[1])
        socket.create_connection(address, wait_s, (source, 0)).close()
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize(
    ("family", "bound"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::")]
)
def test_the_kernel_drops_what_a_blocked_host_sends(
    family: socket.AddressFamily, bound: str
) -> None:
    with listening(family, bound) as listener:
        block_hosts([listener], {"10.1.2.3", "127.0.0.2", "2001:db8::/64"})
        assert not connects(listener, "127.0.0.1", "127.0.0.2", _DROPPED_S)
        assert connects(listener, "127.0.0.1", "127.0.0.1", _ADMITTED_S)
        block_hosts([listener], ())
        assert connects(listener, "127.0.0.1", "127.0.0.2", _ADMITTED_S)


def test_an_ipv6_network_is_blocked_as_one_host() -> None:
    with listening(socket.AF_INET6, "::1") as listener:
        block_hosts([listener], {"2001:db8::/64", "10.0.0.1"})
        assert connects(listener, "::1", "::1", _ADMITTED_S)
        block_hosts([listener], {"2001:db8::/64", "::/64"})
        assert not connects(listener, "::1", "::1", _DROPPED_S)


def test_a_block_ends_and_their_number_is_bounded() -> None:
    now_s = 0.0
    blocks = HostBlocks(10.0, lambda: now_s)
    assert blocks.block("10.0.0.1")
    assert not blocks.block("10.0.0.1")
    assert not blocks.block("unix:/some/path")
    for number in range(HOSTS_MAX):
        blocks.block(f"10.0.1.{number}")
    assert len(blocks.current()) == HOSTS_MAX
    now_s = 10.0
    assert not blocks.current()
    assert not HostBlocks(0.0).block("10.0.0.1")
