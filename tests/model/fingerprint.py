"""Compares states of a world."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.model.world import World


def fingerprint(world: World) -> tuple[Any, ...]:
    """Everything in a world's state that matters for what can follow."""
    now_s = world.timers.time()
    transfers = tuple(
        (
            transfer_id,
            transfer.state,
            transfer.ledger.missing() if transfer.ledger else "",
            len(transfer.writers),
            len(transfer.quarantines),
            tuple(sorted(world.landed[transfer_id])),
            round(now_s - world.reserved_s[transfer_id], 3),
        )
        for transfer_id, transfer in world.transfers.items()
    )
    streams = tuple(
        (
            stream.sender_end.over,
            round(stream.sender_end.lease.remaining_s(now_s), 3),
            tuple(map(str, stream.to_decode.messages)),
            tuple(map(str, stream.to_prefill.messages)),
            max(0.0, round(stream.to_decode.open_s - now_s, 3)),
            max(0.0, round(stream.to_prefill.open_s - now_s, 3)),
        )
        for stream in world.streams
    )
    writes = tuple(
        (w.transfer_id, w.keys, w.future is None, w.late, round(w.end_s - now_s, 3))
        for w in world.writes
    )
    ranks = tuple(
        (r.ref.incarnation, tuple(sorted(r.reports)), r.sender.has_records, r.loop.wait_s())
        for r in world.ranks
    )
    scripts = tuple((s.name, len(s.steps), max(0.0, s.open_s - now_s)) for s in world.scripts)
    return transfers, streams, writes, ranks, scripts, world.timers.pending()
