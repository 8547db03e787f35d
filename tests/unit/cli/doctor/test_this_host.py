"""The checks of a host and of clocks."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from headrace_cli.doctor import this_host
from headrace_cli.doctor.finding import Verdict
from headrace_cli.doctor.members import clock_findings
from headrace_cli.doctor.this_host import check_kv_ports, listening_ports

_SECOND_NS = 10**9


def test_open_kv_ports_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert port in listening_ports()
        monkeypatch.setattr(this_host, "KV_PORTS", range(port, port + 1))
        finding = check_kv_ports()
        assert finding.verdict is Verdict.ERROR
        assert str(port) in finding.detail
        monkeypatch.setattr(this_host, "_UNUSED_SOURCE", "192.0.2.1")
        # A connection that fails, as behind a filter.
        assert check_kv_ports().verdict is Verdict.OK
    assert "no KV transport listens" in check_kv_ports().detail


def test_many_ports_that_admit_no_caller_take_the_time_of_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A queue without room drops callers, as a filter does."""
    monkeypatch.setattr(this_host, "_CONNECT_TIMEOUT_S", 1.0)
    with ExitStack() as held:
        servers = [held.enter_context(_full_server()) for _ in range(40)]
        open_server = held.enter_context(socket.create_server(("127.0.0.1", 0)))
        ports = [server.getsockname()[1] for server in (*servers, open_server)]
        start_s = time.monotonic()
        found = this_host._ports_that_accept_strangers(ports)
        assert found == ports[-1:]
        assert time.monotonic() - start_s < 20


@contextmanager
def _full_server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, ExitStack() as held:
        for _ in range(2):
            caller = held.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(server.getsockname())
        yield server


@pytest.mark.parametrize(
    ("sent_s", "text"),
    [(0.0, ""), (97.0, "3.0 s behind"), (99.5, ""), (101.5, ""), (104.0, "3.0 s ahead of")],
)
def test_a_clock_that_is_far_off_is_named(sent_s: float, text: str) -> None:
    found = clock_findings("w", int(sent_s * _SECOND_NS), 100 * _SECOND_NS, 101 * _SECOND_NS)
    assert [text in one.detail for one in found] == ([True] if text else [])
