"""Opens that arrive before their reservation: decode reserves while prefill computes already."""

from __future__ import annotations

from collections.abc import Callable

from headrace_kv.handoff.clock import TimerHandle, Timers, running_timers
from headrace_kv.receive.transfer import PrefillPeer


class PendingOpens:
    """At most `limit` Opens, each for `wait_s`. `on_expired(transfer_id, peer)` is called after that."""

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
        self._expiries: dict[str, dict[PrefillPeer, tuple[TimerHandle, bytes]]] = {}

    def add(self, transfer_id: str, peer: PrefillPeer, ticket: bytes) -> bool:
        """Returns False when the limit is reached. `ticket` is verified when its transfer is known."""
        if self._count >= self._limit:
            return False
        expiries = self._expiries.setdefault(transfer_id, {})
        if peer not in expiries:
            self._count += 1
            timer = running_timers(self._timers).call_later(
                self._wait_s, self._expire, transfer_id, peer
            )
            expiries[peer] = timer, ticket
        return True

    def remove(self, transfer_id: str) -> list[tuple[PrefillPeer, bytes]]:
        """Removes the Opens of a transfer and returns their peers and tickets."""
        expiries = self._expiries.pop(transfer_id, {})
        self._count -= len(expiries)
        for timer, _ in expiries.values():
            timer.cancel()
        return [(peer, ticket) for peer, (_, ticket) in expiries.items()]

    def remove_peer(self, peer: PrefillPeer) -> None:
        """Removes the Opens of a peer."""
        opened = [known for known, expiries in self._expiries.items() if peer in expiries]
        for transfer_id in opened:
            self._remove(transfer_id, peer)

    def clear(self) -> None:
        """Removes every Open."""
        for transfer_id in list(self._expiries):
            self.remove(transfer_id)

    def _expire(self, transfer_id: str, peer: PrefillPeer) -> None:
        self._remove(transfer_id, peer)
        self._on_expired(transfer_id, peer)

    def _remove(self, transfer_id: str, peer: PrefillPeer) -> None:
        expiries = self._expiries[transfer_id]
        timer, _ = expiries.pop(peer)
        timer.cancel()
        self._count -= 1
        if not expiries:
            del self._expiries[transfer_id]
