"""What fake decode and prefill workers share: the KV layout, and a stand-in for the data plane."""

from __future__ import annotations

import asyncio

from headrace_kv.layout.layout import KvLayout

LAYOUT = KvLayout.attention(
    model="sim", dtype="float32", layer_count=4, kv_head_count=2, block_tokens=16, parts={"kv": 64}
)


class Handoff:
    """Stands in for the data plane: an event per transfer, set when its KV cache is complete."""

    def __init__(self) -> None:
        self._events: dict[str, asyncio.Event] = {}

    def of(self, transfer_id: str) -> asyncio.Event:
        return self._events.setdefault(transfer_id, asyncio.Event())
