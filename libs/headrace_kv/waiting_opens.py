"""Opens that came before their reservation: decode reserves while prefill computes already."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headrace_kv.incoming import PrefillPeer


class WaitingOpens:
    """At most `limit` Opens, each for `wait_s`; those that waited in vain go to `on_expired(transfer_id, peer)`."""

    def __init__(
        self, limit: int, wait_s: float, on_expired: Callable[[str, PrefillPeer], None]
    ) -> None:
        self._limit = limit
        self._wait_s = wait_s
        self._on_expired = on_expired
        self._count = 0
        self._timers: dict[str, dict[PrefillPeer, asyncio.TimerHandle]] = {}

    def add(self, transfer_id: str, peer: PrefillPeer) -> bool:
        """False when too many wait already."""
        if self._count >= self._limit:
            return False
        timers = self._timers.setdefault(transfer_id, {})
        if peer not in timers:
            self._count += 1
            timers[peer] = asyncio.get_running_loop().call_later(
                self._wait_s, self._expire, transfer_id, peer
            )
        return True

    def take(self, transfer_id: str) -> list[PrefillPeer]:
        """Who waits for a transfer; they wait no more."""
        timers = self._timers.pop(transfer_id, {})
        self._count -= len(timers)
        for timer in timers.values():
            timer.cancel()
        return list(timers)

    def forget(self, peer: PrefillPeer) -> None:
        """The peer is gone."""
        for transfer_id in [known for known, timers in self._timers.items() if peer in timers]:
            self._drop(transfer_id, peer)

    def clear(self) -> None:
        """Nobody waits any more."""
        for transfer_id in list(self._timers):
            self.take(transfer_id)

    def _expire(self, transfer_id: str, peer: PrefillPeer) -> None:
        self._drop(transfer_id, peer)
        self._on_expired(transfer_id, peer)

    def _drop(self, transfer_id: str, peer: PrefillPeer) -> None:
        timers = self._timers[transfer_id]
        timers.pop(peer).cancel()
        self._count -= 1
        if not timers:
            del self._timers[transfer_id]
