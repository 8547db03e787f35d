"""Which connections are closed when there are too many."""

from __future__ import annotations

import os
import resource
import socket
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_common.process.connections import (
    ConnectionBounds,
    reserve_descriptors,
    surplus,
)
from headrace_common.process.open_connections import (
    Connection,
    PortConnections,
    connections_to,
    copy_of,
    names_of,
    open_descriptors,
)
from headrace_common.process.settings import load_config
from headrace_router.config import RouterConfig


def connections(**counts: int) -> list[Connection]:
    return [
        Connection(number, host, f"{host}:{number}")
        for host, count in counts.items()
        for number in range(count)
    ]


def test_within_the_bounds_nothing_is_closed() -> None:
    assert surplus(connections(a=50, b=30), (), ConnectionBounds(100, 50)) == []


def test_a_host_keeps_its_bound_and_its_busy_connections() -> None:
    found = connections(a=60, b=30)
    busy = {one.peer for one in found if one.host == "a" and one.descriptor >= 5}
    closed = surplus(found, busy, ConnectionBounds(1_000, 50))
    assert {(one.host, one.descriptor) for one in closed} == {("a", n) for n in range(5)}


def test_the_largest_hosts_make_room_when_the_listener_is_nearly_full() -> None:
    closed = surplus(connections(a=60, b=35, c=5), (), ConnectionBounds(100, 100))
    assert Counter(one.host for one in closed) == {"a": 10}
    closed = surplus(connections(a=60, b=60, c=5), (), ConnectionBounds(100, 100))
    assert set(Counter(one.host for one in closed).values()) <= {17, 18}
    assert len(closed) == 35


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 40), min_size=1),
    st.integers(1, 100),
    st.integers(1, 40),
)
def test_only_idle_connections_are_closed_and_small_hosts_last(
    counts: dict[str, int], total: int, per_host: int
) -> None:
    found = connections(**counts)
    busy = {one.peer for one in found if one.descriptor % 3 == 0}
    closed = surplus(found, busy, ConnectionBounds(total, per_host))
    assert len({one.peer for one in closed}) == len(closed)
    assert not {one.peer for one in closed} & busy
    left = [one for one in found if one not in closed]
    idle_left = Counter(one.host for one in left if one.peer not in busy)
    left_of = Counter(one.host for one in left)
    for host, count in left_of.items():
        assert count <= per_host or not idle_left[host]
    if len(left) > total:
        assert not idle_left
    for host in {one.host for one in closed}:
        # No host with idle connections keeps more than one that lost some.
        assert all(left_of[other] <= left_of[host] + 1 for other in idle_left)


def test_callers_are_named_as_grpc_names_them() -> None:
    assert names_of("10.0.0.7", 4) == ("10.0.0.7", "ipv4:10.0.0.7:4")
    assert names_of("::ffff:10.0.0.7", 4) == ("10.0.0.7", "ipv4:10.0.0.7:4")
    host, peer = names_of("2001:db8::1:2:3:4", 5)
    assert (host, peer) == ("2001:db8::/64", "ipv6:%5B2001:db8::1:2:3:4%5D:5")


def test_open_descriptors_are_counted() -> None:
    before = open_descriptors()
    held = [socket.socket() for _ in range(10)]
    assert open_descriptors() == before + 10
    for one in held:
        one.close()
    assert open_descriptors() == before


def test_a_descriptor_that_is_another_socket_now_is_asked_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        accepted = PortConnections(address[1])
        placeholder = socket.socket()
        assert accepted.find() == []
        number = placeholder.detach()
        with socket.create_connection(address), listener.accept()[0] as connection:
            # The kernel gives the descriptor of the placeholder to the connection.
            os.dup2(connection.fileno(), number)
            connection.close()
            assert [one.descriptor for one in accepted.find()] == [number]
            assert accepted.find() == connections_to(address[1])
        os.close(number)
        assert accepted.find() == []


def test_a_connection_of_which_another_thread_holds_a_copy_counts_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        with (
            socket.create_connection(address),
            listener.accept()[0] as connection,
            copy_of(connection.fileno()),
        ):
            before = open_descriptors()
            assert len(connections_to(address[1])) == 1
            assert open_descriptors() == before


def test_listeners_share_the_limit_of_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    soft, hard = 1_024, 4_512
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: limits.append(limit))
    config = config_of("127.0.0.1:0")
    assert config.client_listeners == 2
    assert config_of("").client_listeners == 1
    assert config_of("127.0.0.1:0", "127.0.0.1:0").client_listeners == 3
    assert ConnectionBounds.from_config(config).total == 1_500
    assert limits == [(3_512, hard)]
    assert reserve_descriptors(1_500) == 1_500
    assert limits[1:] == [(2_012, hard)]
    assert reserve_descriptors(4_096, 2) == 2_000, "the hard limit leaves fewer"


def config_of(http_listen: str, status_listen: str = "") -> RouterConfig:
    flags = ["--model=sim", "--max-connections=1500", f"--http-listen={http_listen}"]
    flags.append(f"--status-listen={status_listen}")
    return load_config(RouterConfig, flags, prog="test", env_prefix="HEADRACE_TEST_ROUTER_")
