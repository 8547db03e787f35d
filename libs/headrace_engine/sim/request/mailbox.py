"""What an engine has to say to one decode request's reader."""

from __future__ import annotations

import asyncio

from headrace_common.errors import HeadraceError
from headrace_engine.interface import DecodeEnded, DecodeEvent, DecodeTokens, TokenLogprobs
from headrace_kv.handoff.messages import Reservation


class Mailbox:
    """Bounded by the request's own max_tokens: tokens that come faster than they are read are
    joined.
    """

    def __init__(self) -> None:
        self._reservation: Reservation | None = None
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._end: DecodeEnded | None = None
        self._failure: HeadraceError | None = None
        self._filled = asyncio.Event()

    def put_reservation(self, reservation: Reservation) -> None:
        """The blocks are held."""
        self._reservation = reservation
        self._filled.set()

    @property
    def has_reservation(self) -> bool:
        """Whether a reservation is here that has not been read."""
        return self._reservation is not None

    def put_token(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """One more token."""
        self._tokens.append(token_id)
        if logprobs is not None:
            self._logprobs.append(logprobs)
        self._filled.set()

    def put_end(self, end: DecodeEnded) -> None:
        """Nothing follows."""
        self._end = end
        self._filled.set()

    def put_failure(self, failure: HeadraceError) -> None:
        """The request has failed; what was not read yet is lost."""
        self._failure = failure
        self._filled.set()

    async def take(self) -> list[DecodeEvent]:
        """Waits for events and returns all there are, in order. Raises the failure, if there is
        one.
        """
        await self._filled.wait()
        self._filled.clear()
        if self._failure is not None:
            raise self._failure
        events: list[DecodeEvent] = []
        if self._reservation is not None:
            events.append(self._reservation)
            self._reservation = None
        if self._tokens:
            events.append(DecodeTokens(tuple(self._tokens), tuple(self._logprobs)))
            self._tokens.clear()
            self._logprobs.clear()
        if self._end is not None:
            events.append(self._end)
        return events
