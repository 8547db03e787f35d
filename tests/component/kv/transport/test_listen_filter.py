"""The restriction of listening sockets to the host's own address."""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections.abc import Collection, Iterator
from contextlib import ExitStack

import pytest

from headrace_common.errors import ConfigError, QueueFull
from headrace_kv.transport import guard, mooncake
from headrace_kv.transport.base import KvTransport, session_of
from headrace_kv.transport.factory import open_transport
from headrace_kv.transport.guard import (
    Address,
    Networks,
    RestrictedPorts,
    networks_of,
    open_listeners,
    own_tcp_sockets,
    parse_networks,
    resolve_host,
    restrict_listeners,
    restrict_ports,
)
from headrace_kv.transport.mooncake import MooncakeTransport

OWN, OTHER = "127.0.0.1", "127.0.0.2"
NOT_HERE = "203.0.113.7"
REFUSED_S = 0.3
DEADLINE_S = 30.0


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


def connects(host: str, port: int, source: str = "") -> bool:
    origin = (source, 0) if source else None
    try:
        socket.create_connection((host, port), REFUSED_S, source_address=origin).close()
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


@pytest.mark.parametrize(
    ("sources", "admitted"),
    [
        ([], []),
        (["127.0.0.3"], ["127.0.0.3"]),
        (["127.0.0.4/31", "10.0.0.0/8"], ["127.0.0.4", "127.0.0.5"]),
        (["::1", "127.0.0.3"], ["127.0.0.3", "::1"]),
        (["::/0"], ["::1"]),
        (["0.0.0.0/0"], ["127.0.0.3", "127.0.0.4", "127.0.0.5"]),
        (None, ["127.0.0.3", "127.0.0.4", "127.0.0.5", "::1"]),
    ],
)
@pytest.mark.parametrize("addresses", [[], [OWN, "::1"]], ids=["any address", "own addresses"])
def test_only_the_sources_are_admitted(
    known: frozenset[int],
    listener: socket.socket,
    addresses: list[str],
    sources: list[str] | None,
    admitted: list[str],
) -> None:
    port = listener.getsockname()[1]
    networks = None if sources is None else parse_networks(sources)
    restrict_listeners(known, [ipaddress.ip_address(text) for text in addresses], networks)
    hosts = {"127.0.0.3": OWN, "127.0.0.4": OWN, "127.0.0.5": OWN, "::1": "::1"}
    found = [source for source, host in hosts.items() if connects(host, port, source)]
    assert found == admitted


def test_a_source_that_is_withdrawn_loses_its_connections(
    known: frozenset[int], listener: socket.socket
) -> None:
    port = listener.getsockname()[1]
    own = [ipaddress.ip_address(OWN)]
    restrict_listeners(known, own, parse_networks(["127.0.0.3", "127.0.0.4"]))
    with ExitStack() as stack:
        leaving, staying = (
            stack.enter_context(
                socket.create_connection((OWN, port), DEADLINE_S, source_address=(source, 0))
            )
            for source in ("127.0.0.3", "127.0.0.4")
        )
        accepted = [stack.enter_context(listener.accept()[0]) for _ in range(2)]
        restrict_ports({port}, own, parse_networks(["127.0.0.4"]))
        assert leaving.recv(1) == b""
        staying.sendall(b"x")
        accepted[1].settimeout(DEADLINE_S)
        assert accepted[1].recv(1) == b"x"
    assert not connects(OWN, port, "127.0.0.3")
    assert connects(OWN, port, "127.0.0.4")


def test_the_number_of_sources_is_bounded(known: frozenset[int], listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    own = [ipaddress.ip_address(OWN)]
    first = int(ipaddress.ip_address("200.0.0.1"))
    scattered = [ipaddress.ip_address(first + 2 * number) for number in range(200)]
    with pytest.raises(QueueFull, match="set transfer_peer_networks to a network that contains"):
        restrict_listeners(known, own, networks_of(scattered))
    most = networks_of([*scattered[:90], ipaddress.ip_address("127.0.0.3")])
    # The kernel holds two such filters while it replaces one.
    for _ in range(3):
        assert restrict_ports({port}, own, most).filtered == {port}
    assert connects(OWN, port, "127.0.0.3")
    assert not connects(OWN, port, "127.0.0.4")


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


def test_a_transport_admits_named_hosts_only() -> None:
    known = open_listeners()
    transport = open_transport("mooncake", OWN, "tcp", admitted=parse_networks(["127.0.0.3"]))
    try:
        assert session_of("mooncake", transport.session)
        # Two of the receiving engine, and one of the receiver of packed bytes.
        ports = new_ports(known)
        assert len(ports) == 3
        for admitted, other in (("127.0.0.3", "127.0.0.4"), ("127.0.0.4", "127.0.0.3")):
            transport.admit(parse_networks([admitted]))
            assert all(connects(OWN, port, admitted) for port in ports)
            assert not any(connects(OWN, port, other) for port in ports)
        transport.admit(None)
        assert all(connects(OWN, port, "127.0.0.3") for port in ports)
        assert not any(connects(OTHER, port, "127.0.0.3") for port in ports - packed(transport))
        assert {str(one) for one in transport.source_addresses({transport.session})} == {OWN}
    finally:
        transport.close()


def packed(transport: KvTransport) -> set[int]:
    """The port of a transport's receiver of packed bytes, which listens on its own address only."""
    server = session_of("scatter", transport.session) or ""
    return {int(server.partition("/")[0].rpartition(":")[2])}


@pytest.mark.parametrize("protocol", ["tcp", "rdma"])
def test_only_over_rdma_a_called_peer_may_connect_to_the_sending_engine(
    protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = MooncakeTransport(OWN, "tcp")
    # No engine is made: there may be no device.
    monkeypatch.setattr(transport, "protocol", protocol)
    filters: list[Networks | None] = []

    def restrict(
        ports: Collection[int], addresses: Collection[Address], sources: Networks | None
    ) -> RestrictedPorts:
        filters.append(sources)
        return RestrictedPorts(frozenset(ports), frozenset())

    monkeypatch.setattr(mooncake, "restrict_ports", restrict)
    transport.admit(parse_networks(["10.0.0.0/24"]))
    transport._admit_called("127.0.0.9:15000")
    expected = {"tcp": (), "rdma": parse_networks(["10.0.0.0/24", "127.0.0.9"])}
    assert filters[-1] == expected[protocol]


@pytest.mark.parametrize("cause", ["no address of this machine", "the kernel refused"])
def test_a_warning_names_ports_that_stay_open(
    cause: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = OWN if "kernel" in cause else NOT_HERE
    monkeypatch.setattr(guard, "_attach", lambda listener, program: False)
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
