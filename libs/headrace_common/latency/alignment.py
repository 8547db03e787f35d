"""Moves workers' steps within the error of their clocks, so that nothing arrives before it was sent. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from headrace_common.latency.steps import BY_PREFILL, AttemptSteps


def alignment_of(
    attempt: AttemptSteps, first_us: int | None, second_us: int | None
) -> tuple[int, int]:
    """Microseconds to add to all steps of the prefill worker, and to all of the decode worker: the least that helps.

    `first_us` and `second_us` are the router's receipts of the first tokens, if this attempt made them. Where the last
    write landed after decode had the KV cache, both workers move, each in proportion to the room that it has.
    """
    prefill, decode, error_us = attempt.prefill, attempt.decode, attempt.error_us
    if not error_us:
        return 0, 0
    by_prefill = attempt.first_token_by == BY_PREFILL
    lowest_us = prefill_us = decode_us = highest_us = 0
    if prefill is not None:
        made = prefill.sent if by_prefill else None
        lowest_us, prefill_us, _ = _moves(
            error_us, [(attempt.pulled, prefill.received)], [(made, first_us)]
        )
    if decode is not None:
        made = None if by_prefill else decode.sampled or decode.first_token
        sent = [(attempt.start, decode.received), (first_us, decode.token_received)]
        received = [(made, first_us), (decode.first_token, second_us)]
        _, decode_us, highest_us = _moves(error_us, sent, received)
    if prefill is None or decode is None or decode.kv_arrived is None:
        return prefill_us, decode_us
    landed = prefill.last_write or prefill.compute_end or prefill.received
    prefill_room_us, decode_room_us = prefill_us - lowest_us, highest_us - decode_us
    room_us = prefill_room_us + decode_room_us
    early_us = max(0, min(room_us, landed + prefill_us - decode.kv_arrived - decode_us))
    back_us = early_us * prefill_room_us // max(1, room_us)
    return prefill_us - back_us, decode_us + early_us - back_us


def _moves(
    error_us: int,
    sent_to: Iterable[tuple[int | None, int | None]],
    received_from: Iterable[tuple[int | None, int | None]],
) -> tuple[int, int, int]:
    """The lowest, the least and the highest move of a worker. Pairs are a message's start and its end."""
    low = [start - end for start, end in sent_to if start is not None and end is not None]
    high = [end - start for start, end in received_from if start is not None and end is not None]
    # Without an order that meets all, what the worker receives counts.
    lowest = min(error_us, max(-error_us, *low, -error_us))
    highest = max(lowest, min(error_us, *high, error_us))
    return lowest, min(max(0, lowest), highest), highest
