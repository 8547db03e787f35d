"""The events of one decode request, between the step loop and the caller that reads them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from headrace_common.errors import HeadraceError
from headrace_engine.interface import DecodeEnded, DecodeEvent, DecodeTokens
from headrace_kv.messages import Reservation


class DecodeEventQueue:
    """Bounded by the request's max_tokens. Tokens that come faster than they are read are joined."""

    def __init__(self) -> None:
        self._events: list[DecodeEvent] = []
        self._failure: HeadraceError | None = None
        self._filled = asyncio.Event()

    @property
    def has_reservation(self) -> bool:
        """Whether it holds a reservation that was not read."""
        return any(isinstance(event, Reservation) for event in self._events)

    def put(self, event: DecodeEvent) -> None:
        """A Reservation must be the first event, and DecodeEnded the last one."""
        last = self._events[-1] if self._events else None
        if isinstance(event, DecodeTokens) and isinstance(last, DecodeTokens):
            self._events[-1] = DecodeTokens(
                last.token_ids + event.token_ids,
                last.logprobs + event.logprobs,
                event.step_start_ns,
                last.prompt_logprobs,
            )
        else:
            self._events.append(event)
        self._filled.set()

    def put_failure(self, failure: HeadraceError) -> None:
        """Makes `read` raise. Events that were not read are dropped."""
        self._failure = failure
        self._filled.set()

    async def read(self) -> AsyncGenerator[DecodeEvent, None]:
        """All events in order, up to the end. Raises the failure, if there is one."""
        while True:
            await self._filled.wait()
            self._filled.clear()
            if self._failure is not None:
                raise self._failure
            events, self._events = self._events, []
            for event in events:
                yield event
                if isinstance(event, DecodeEnded):
                    return
