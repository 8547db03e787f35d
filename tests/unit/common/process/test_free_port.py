"""Ports for processes that are yet to start."""

from __future__ import annotations

import os
import socket

import pytest

from headrace_common import ports as module
from headrace_common.errors import ConfigError
from headrace_common.ports import (
    END_PORT,
    FIRST_PORT,
    PORTS_PER_PROCESS,
    free_port,
)


def test_no_port_comes_twice_before_the_share_is_used_up() -> None:
    found = [free_port() for _ in range(10)]
    assert len(set(found)) == 10
    assert all(FIRST_PORT <= port < END_PORT for port in found)


def test_neighbouring_processes_choose_different_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[int] = []
    for process_id in range(500, 600):
        monkeypatch.setattr(os, "getpid", lambda process_id=process_id: process_id)
        shares.append((free_port() - FIRST_PORT) // PORTS_PER_PROCESS)
    assert len(set(shares)) == 100


def test_a_port_in_use_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PORTS_PER_PROCESS", 2)
    with socket.socket() as first, socket.socket() as second:
        taken = free_port("127.0.0.9")
        first.bind(("127.0.0.9", taken))
        first.listen()
        other = free_port("127.0.0.9")
        assert other != taken
        second.bind(("127.0.0.9", other))
        second.listen()
        with pytest.raises(ConfigError, match="all in use"):
            free_port("127.0.0.9")
