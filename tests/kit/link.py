"""The end of a decode link in tests: keeps the events of one request until they are read."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import TypeAlias

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import sampling_pb2
from headrace_router.decode_link.answer import LinkedAnswer

AnswerEvent: TypeAlias = decode_pb2.Reserved | decode_pb2.Tokens | decode_pb2.Finished


class KeptEvents(LinkedAnswer):
    """`has_room`: what it reports about tokens."""

    vocabulary_size = 1 << 32

    def __init__(self, *, has_room: bool = True) -> None:
        self._events: deque[AnswerEvent | Exception] = deque()
        self._arrived = asyncio.Event()
        self._has_room = has_room

    def reserve(self, reserved: decode_pb2.Reserved) -> None:
        self._keep(reserved)

    def add_batch(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[sampling_pb2.TokenLogprobs],
        prompt_logprobs: Sequence[sampling_pb2.TokenLogprobs],
    ) -> bool:
        self._keep(
            decode_pb2.Tokens(
                token_ids=token_ids, logprobs=logprobs, prompt_logprobs=prompt_logprobs
            )
        )
        return self._has_room

    def finish(self, finished: decode_pb2.Finished) -> None:
        self._keep(finished)

    def fail(self, error: Exception) -> None:
        self._keep(error)

    worker_failed = fail

    def _keep(self, event: AnswerEvent | Exception) -> None:
        self._events.append(event)
        self._arrived.set()

    def poll(self) -> AnswerEvent | None:
        """The next event. None when there is none. Raises an error."""
        event = self._events.popleft() if self._events else None
        if isinstance(event, Exception):
            raise event
        return event

    async def read(self) -> AnswerEvent:
        """As `poll`, once there is an event."""
        while (event := self.poll()) is None:
            self._arrived.clear()
            await self._arrived.wait()
        return event
