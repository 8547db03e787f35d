"""The checks of a host and of clocks."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from headrace_cli.doctor import this_host
from headrace_cli.doctor.finding import Finding, Verdict
from headrace_cli.doctor.members import clock_findings
from headrace_cli.doctor.this_host import check_host, listening_ports

_SECOND_NS = 10**9


def finding_of(subject: str) -> Finding:
    (finding,) = [one for one in check_host() if one.subject == subject]
    return finding


def test_open_kv_ports_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert port in listening_ports()
        monkeypatch.setattr(this_host, "KV_PORTS", range(port, port + 1))
        finding = finding_of("KV ports")
        assert finding.verdict is Verdict.ERROR
        assert str(port) in finding.detail
        monkeypatch.setattr(this_host, "_UNUSED_SOURCE", "192.0.2.1")
        # A connection that fails, as behind a filter.
        assert finding_of("KV ports").verdict is Verdict.OK
    assert "no KV transport listens" in finding_of("KV ports").detail


def test_the_kernels_features_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert finding_of("socket filters").verdict is Verdict.OK
    monkeypatch.setattr(this_host, "_SO_ATTACH_FILTER", 9_999)
    assert finding_of("socket filters").verdict is Verdict.ERROR
    scope = tmp_path / "ptrace_scope"
    monkeypatch.setattr(this_host, "_PTRACE_SCOPE", scope)
    assert finding_of("same_host").verdict is Verdict.OK
    for value in ("1", "2"):
        scope.write_text(value)
        assert finding_of("same_host").verdict is Verdict.WARNING


@pytest.mark.parametrize(
    ("sent_s", "text"),
    [(0.0, ""), (97.0, "3.0 s behind"), (99.5, ""), (101.5, ""), (104.0, "3.0 s ahead of")],
)
def test_a_clock_that_is_far_off_is_named(sent_s: float, text: str) -> None:
    found = clock_findings("w", int(sent_s * _SECOND_NS), 100 * _SECOND_NS, 101 * _SECOND_NS)
    assert [text in one.detail for one in found] == ([True] if text else [])
