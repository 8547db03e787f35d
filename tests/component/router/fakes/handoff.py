"""A stand-in for the data plane of fake decode and prefill workers."""

from __future__ import annotations

import asyncio


class Handoff:
    """Stands in for the data plane: an event per transfer, set when its KV cache is complete."""

    def __init__(self) -> None:
        self._events: dict[str, asyncio.Event] = {}

    def of(self, transfer_id: str) -> asyncio.Event:
        return self._events.setdefault(transfer_id, asyncio.Event())
