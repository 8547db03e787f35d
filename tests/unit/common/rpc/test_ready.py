"""What a service reports to systemd."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from headrace_common.rpc.server import notify_ready


@pytest.mark.parametrize("kind", ["path", "abstract"])
def test_a_unit_gets_one_message(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "notify")
    name, address = (path, path) if kind == "path" else (f"@{path}", f"\0{path}")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as unit:
        unit.bind(address)
        unit.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        notify_ready()
        assert unit.recv(64) == b"READY=1"


def test_without_a_reader_a_service_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nothing"))
    notify_ready()
    monkeypatch.delenv("NOTIFY_SOCKET")
    notify_ready()
