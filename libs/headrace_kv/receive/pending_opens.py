"""Opens that came before their reservation: decode reserves while prefill computes already."""

from __future__ import annotations

from collections.abc import Callable

from headrace_kv.handoff.clock import TimerHandle, Timers, running_timers
from headrace_kv.receive.transfer import PrefillPeer


class PendingOpens:
    """At most `limit` Opens, each for `wait_s`; those that waited in vain go to `on_expired(transfer_id, peer)`."""

    def __init__(
        self,
        limit: int,
        wait_s: float,
        on_expired: Callable[[str, PrefillPeer], None],
        timers: Timers | None = None,
    ) -> None:
        self._timers = timers
        self._limit = limit
        self._wait_s = wait_s
        self._on_expired = on_expired
        self._count = 0
        self._waits: dict[str, dict[PrefillPeer, TimerHandle]] = {}

    def add(self, transfer_id: str, peer: PrefillPeer) -> bool:
        """False when too many wait already."""
        if self._count >= self._limit:
            return False
        waits = self._waits.setdefault(transfer_id, {})
        if peer not in waits:
            self._count += 1
            waits[peer] = running_timers(self._timers).call_later(
                self._wait_s, self._expire, transfer_id, peer
            )
        return True

    def take(self, transfer_id: str) -> list[PrefillPeer]:
        """Who waits for a transfer; they wait no more."""
        waits = self._waits.pop(transfer_id, {})
        self._count -= len(waits)
        for timer in waits.values():
            timer.cancel()
        return list(waits)

    def forget(self, peer: PrefillPeer) -> None:
        """The peer is gone."""
        for transfer_id in [known for known, waits in self._waits.items() if peer in waits]:
            self._drop(transfer_id, peer)

    def clear(self) -> None:
        """Nobody waits any more."""
        for transfer_id in list(self._waits):
            self.take(transfer_id)

    def _expire(self, transfer_id: str, peer: PrefillPeer) -> None:
        self._drop(transfer_id, peer)
        self._on_expired(transfer_id, peer)

    def _drop(self, transfer_id: str, peer: PrefillPeer) -> None:
        waits = self._waits[transfer_id]
        waits.pop(peer).cancel()
        self._count -= 1
        if not waits:
            del self._waits[transfer_id]
