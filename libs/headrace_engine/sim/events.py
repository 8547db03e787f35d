"""The events of one decode request, between the step loop and the caller that reads them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headrace_common.errors import HeadraceError
from headrace_engine.interface import DecodeEnded, DecodeEvent, DecodeTokens, TokenLogprobs
from headrace_kv.handoff.messages import Reservation


class DecodeEventQueue:
    """Bounded by the request's max_tokens. Tokens that come faster than they are read are joined."""

    def __init__(self) -> None:
        self._reservation: Reservation | None = None
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._step_start_ns = 0
        self._end: DecodeEnded | None = None
        self._failure: HeadraceError | None = None
        self._filled = asyncio.Event()
        self._on_events: Callable[[], None] | None = None

    def follow(self, on_events: Callable[[], None]) -> None:
        """Calls `on_events` for every event from now on, and at once if there is one. `wait` is not for followers."""
        self._on_events = on_events
        if self._filled.is_set():
            on_events()

    def put_reservation(self, reservation: Reservation) -> None:
        """Comes before all other events."""
        self._reservation = reservation
        self._notify()

    @property
    def has_reservation(self) -> bool:
        """Whether it holds a reservation that was not read."""
        return self._reservation is not None

    def put_token(
        self, token_id: int, logprobs: TokenLogprobs | None, step_start_ns: int = 0
    ) -> None:
        """Joins the token to those that were not read. `step_start_ns`: see DecodeTokens."""
        self._step_start_ns = step_start_ns
        self._tokens.append(token_id)
        if logprobs is not None:
            self._logprobs.append(logprobs)
        self._notify()

    def put_end(self, end: DecodeEnded) -> None:
        """Must be the last event."""
        self._end = end
        self._notify()

    def put_failure(self, failure: HeadraceError) -> None:
        """Makes `take` raise. Events that were not read are dropped."""
        self._failure = failure
        self._notify()

    async def wait(self) -> None:
        """Returns when there are events, or the failure."""
        await self._filled.wait()

    def take(self) -> list[DecodeEvent]:
        """All events that were not read, in order. Raises the failure, if there is one."""
        self._filled.clear()
        if self._failure is not None:
            raise self._failure
        events: list[DecodeEvent] = []
        if self._reservation is not None:
            events.append(self._reservation)
            self._reservation = None
        if self._tokens:
            events.append(
                DecodeTokens(tuple(self._tokens), tuple(self._logprobs), self._step_start_ns)
            )
            self._tokens.clear()
            self._logprobs.clear()
        if self._end is not None:
            events.append(self._end)
            self._end = None
        return events

    def _notify(self) -> None:
        if self._on_events is None:
            self._filled.set()
        else:
            self._on_events()
