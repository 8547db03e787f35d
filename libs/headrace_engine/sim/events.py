"""The events of one decode request, between the step loop and the caller that reads them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from headrace_common.errors import HeadraceError
from headrace_engine.interface import DecodeEnded, DecodeEvent, DecodeTokens, TokenLogprobs
from headrace_kv.messages import Reservation


class DecodeEventQueue:
    """Bounded by the request's max_tokens. Tokens that come faster than they are read are joined."""

    def __init__(self) -> None:
        self._reservation: Reservation | None = None
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self._step_start_ns = 0
        self._end: DecodeEnded | None = None
        self._failure: HeadraceError | None = None
        self._filled = asyncio.Event()

    def put_reservation(self, reservation: Reservation) -> None:
        """Comes before all other events."""
        self._reservation = reservation
        self._filled.set()

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
        self._filled.set()

    def put_prompt_logprobs(self, logprobs: tuple[TokenLogprobs, ...]) -> None:
        """They come with the first token, which must follow."""
        self._prompt_logprobs = logprobs

    def put_end(self, end: DecodeEnded) -> None:
        """Must be the last event."""
        self._end = end
        self._filled.set()

    def put_failure(self, failure: HeadraceError) -> None:
        """Makes `read` raise. Events that were not read are dropped."""
        self._failure = failure
        self._filled.set()

    async def read(self) -> AsyncGenerator[DecodeEvent, None]:
        """All events in order, up to the end. Raises the failure, if there is one."""
        while True:
            await self._filled.wait()
            for event in self._take():
                yield event
                if isinstance(event, DecodeEnded):
                    return

    def _take(self) -> list[DecodeEvent]:
        self._filled.clear()
        if self._failure is not None:
            raise self._failure
        events: list[DecodeEvent] = []
        if self._reservation is not None:
            events.append(self._reservation)
            self._reservation = None
        if self._tokens:
            events.append(
                DecodeTokens(
                    tuple(self._tokens),
                    tuple(self._logprobs),
                    self._step_start_ns,
                    self._prompt_logprobs,
                )
            )
            self._prompt_logprobs = ()
            self._tokens.clear()
            self._logprobs.clear()
        if self._end is not None:
            events.append(self._end)
            self._end = None
        return events
