"""Both clocks at one moment, although the thread is interrupted between the looks."""

from __future__ import annotations

import time

import pytest

from headrace_common.latency.clocks import clocks_now

AHEAD_NS = 10**18
PAUSE_NS = 30_000_000


class Clocks:
    """Every look takes 100 ns. There are pauses before the looks with these numbers."""

    def __init__(self, *pauses: int) -> None:
        self.pauses = pauses
        self.looks = 0
        self.now_ns = 0

    def look(self) -> int:
        self.now_ns += 100 + PAUSE_NS * (self.looks in self.pauses)
        self.looks += 1
        return self.now_ns

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(time, "monotonic_ns", self.look)
        monkeypatch.setattr(time, "time_ns", lambda: AHEAD_NS + self.look())


def test_clocks_are_read_once_without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks()
    clocks.install(monkeypatch)
    assert clocks_now() == (AHEAD_NS + 200, 200, 100)
    assert clocks.looks == 3


@pytest.mark.parametrize("pauses", [(1,), (2,), (1, 4), (2, 4, 8, 10)])
def test_clocks_are_read_again_after_a_pause(
    monkeypatch: pytest.MonkeyPatch, pauses: tuple[int, ...]
) -> None:
    Clocks(*pauses).install(monkeypatch)
    found = clocks_now()
    assert found.unix_ns - found.monotonic_ns == AHEAD_NS
    assert found.error_ns == 100
