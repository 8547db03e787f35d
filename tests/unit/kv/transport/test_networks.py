"""Addresses and networks of transfer peers, and sessions in messages."""

from __future__ import annotations

import ipaddress

import pytest

from headrace_kv.transport.base import host_of
from headrace_kv.transport.guard import address_of_peer, networks_of, parse_networks


def test_networks_are_merged() -> None:
    found = parse_networks(["10.0.0.0/25", "10.0.0.128/25", "10.0.0.7", "fd00::/64"])
    assert [str(network) for network in found] == ["10.0.0.0/24", "fd00::/64"]
    addresses = [ipaddress.ip_address(text) for text in ("10.0.0.2", "10.0.0.3", "::1")]
    assert [str(network) for network in networks_of(addresses)] == ["10.0.0.2/31", "::1/128"]


@pytest.mark.parametrize("text", ["10.0.0.1/24", "worker.example", ""])
def test_a_wrong_network_is_rejected_with_the_remedy(text: str) -> None:
    with pytest.raises(ValueError, match=r"give addresses or networks such as 10\.0\.0\.0/24"):
        parse_networks([text])


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.0.0.7:51234", "10.0.0.7"),
        ("ipv6:%5B::1%5D:51234", "::1"),
        ("ipv6:[fe80::1%25eth0]:51234", "fe80::1"),
        ("ipv6:%5B::ffff:10.0.0.7%5D:51234", "10.0.0.7"),
        ("unix:/tmp/socket", None),
        ("", None),
    ],
)
def test_the_address_of_a_grpc_peer(peer: str, address: str | None) -> None:
    found = address_of_peer(peer)
    assert (found if found is None else str(found)) == address


@pytest.mark.parametrize(
    ("session", "host"),
    [
        ("10.0.0.7:15123", "10.0.0.7"),
        ("mooncake=10.0.0.7:15123;scatter=10.0.0.7:41234/00ff", "10.0.0.7"),
        ("landing=worker.example:41234/00ff", "worker.example"),
        ("boot.namespace.7.8.9.00ff", "the peer"),
    ],
)
def test_messages_show_the_host_of_a_session_only(session: str, host: str) -> None:
    assert host_of(session) == host
