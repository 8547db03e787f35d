"""A reservation's blocks, as a plan between ranks that both have them. Pure."""

from __future__ import annotations

import numpy as np

from headrace_kv.handoff.messages import Reservation
from headrace_kv.layout.layout import KvLayout
from headrace_kv.plan.copy_plan import Span


def reserved_span(
    layout: KvLayout, reservation: Reservation, group_index: int, start_token: int, end_token: int
) -> Span:
    """Tokens [start_token, end_token) of one of the layout's cache groups, in the reserved blocks on both sides."""
    blocks = np.asarray(reservation.block_ids_by_group[group_index], dtype=np.int64)
    first = reservation.start_token
    first -= first % max(1, layout.groups[group_index].block_tokens)
    return Span(start_token, end_token, blocks, first, blocks, first)
