"""The restriction of listening sockets to the host's own address."""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from headrace_common.errors import ConfigError
from headrace_kv.transport.mooncake import listen_filter
from headrace_kv.transport.mooncake.listen_filter import (
    open_listeners,
    resolve_host,
    restrict_listeners,
)
from headrace_kv.transport.mooncake.sockets import own_tcp_sockets
from headrace_kv.transport.mooncake.transport import MooncakeTransport

OWN, OTHER = "127.0.0.1", "127.0.0.2"
NOT_HERE = "203.0.113.7"
REFUSED_S = 0.3
DEADLINE_S = 5.0


@pytest.fixture
def known() -> frozenset[int]:
    """The listening sockets before the test's own."""
    return open_listeners()


@pytest.fixture
def listener(known: frozenset[int]) -> Iterator[socket.socket]:
    """As Mooncake's data port: on all addresses, without close-on-exec."""
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listener:
        listener.set_inheritable(True)
        yield listener


def connects(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=REFUSED_S).close()
    except TimeoutError:
        return False
    return True


def new_ports(known: frozenset[int]) -> set[int]:
    """The ports of the process's listening sockets that are not `known`."""
    return {own.local_port for own in own_tcp_sockets() if own.listens and own.inode not in known}


@pytest.mark.parametrize(
    "admitted", [[OWN], [OTHER], ["::1"], [OWN, "::1"], ["10.77.0.1", OWN]], ids=" ".join
)
def test_only_the_own_addresses_are_admitted(
    known: frozenset[int], listener: socket.socket, admitted: list[str]
) -> None:
    port = listener.getsockname()[1]
    addresses = [ipaddress.ip_address(text) for text in admitted]
    ports = restrict_listeners(known, addresses)
    assert (ports.filtered, ports.open) == (frozenset({port}), frozenset())
    reached = [host for host in (OWN, OTHER, "::1") if connects(host, port)]
    assert reached == [host for host in (OWN, OTHER, "::1") if host in admitted]


def test_other_listeners_of_the_process_stay_open(known: frozenset[int]) -> None:
    with socket.create_server(("", 0)) as server:
        ports = restrict_listeners(known, [ipaddress.ip_address(OWN)])
        assert not ports.filtered
        assert not ports.open
        server.set_inheritable(True)
        assert not restrict_listeners(open_listeners(), [ipaddress.ip_address(OWN)]).filtered
        assert connects(OTHER, server.getsockname()[1])


@pytest.mark.parametrize("accepted", [True, False])
def test_connections_from_before_the_filter_end(
    known: frozenset[int], listener: socket.socket, accepted: bool
) -> None:
    port = listener.getsockname()[1]
    with ExitStack() as stack:
        other, peer = (
            stack.enter_context(socket.create_connection((host, port), timeout=DEADLINE_S))
            for host in (OTHER, OWN)
        )
        connections: list[socket.socket] = []

        def accept() -> None:
            connections.extend(stack.enter_context(listener.accept()[0]) for _ in range(2))

        # Without a delay the thread would mostly accept before the restriction looks.
        accepting = threading.Timer(0.0 if accepted else 0.1, accept)
        accepting.start()
        if accepted:
            accepting.join(DEADLINE_S)
        restrict_listeners(known, [ipaddress.ip_address(OWN)])
        accepting.join(DEADLINE_S)
        assert other.recv(1) == b""
        peer.sendall(b"x")
        connections[1].settimeout(DEADLINE_S)
        assert connections[1].recv(1) == b"x"


def test_hosts_resolve_to_addresses_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_host(OWN) == (ipaddress.ip_address(OWN),)
    assert ipaddress.ip_address(OWN) in resolve_host("localhost")
    assert resolve_host("0.0.0.0") == ()
    assert resolve_host(NOT_HERE) == ()

    def unknown(*arguments: object, **options: object) -> None:
        raise socket.gaierror("unknown name")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert resolve_host("worker.example") == ()


@pytest.mark.parametrize("host", ["::1", "[::1]", "[fd77::1]"])
def test_a_host_with_ipv6_addresses_only_is_rejected(host: str) -> None:
    with pytest.raises(ConfigError, match="needs an IPv4 address"):
        MooncakeTransport(host, "tcp")


def test_an_engine_accepts_connections_to_its_host_only(caplog: pytest.LogCaptureFixture) -> None:
    known = open_listeners()
    transport = MooncakeTransport(OWN, "tcp")
    try:
        port = int(transport.session.rpartition(":")[2])
        ports = new_ports(known)
        assert port in ports
        assert len(ports) == 2
        assert all(connects(OWN, port) and not connects(OTHER, port) for port in ports)
        assert not caplog.records
    finally:
        transport.close()


@pytest.mark.parametrize("cause", ["no address of this machine", "the kernel refused"])
def test_a_warning_names_ports_that_stay_open(
    cause: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = OWN if "kernel" in cause else NOT_HERE
    monkeypatch.setattr(listen_filter, "_attach", lambda listener, program: False)
    known = open_listeners()
    transport = MooncakeTransport(host, "tcp")
    try:
        port = transport.session.rpartition(":")[2]
        opened = new_ports(known)
        assert len(opened) == 2
        (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
        assert cause in record.getMessage()
        assert port in record.getMessage()
        assert all(str(number) in record.getMessage() for number in opened)
    finally:
        transport.close()
