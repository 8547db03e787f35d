"""One request to a decode worker, on a link of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from headrace.decode.v1 import decode_pb2, decode_pb2_grpc
from headrace_common.durations import duration_from_seconds
from headrace_common.errors import HeadraceError
from headrace_common.rpc.status import error_from_rpc, error_from_status

_CREDIT_TOKENS = 1_000_000


@dataclass(frozen=True, slots=True)
class LinkedEvent:
    """One event. The fields of the other kinds are empty."""

    kind: str
    reserved: decode_pb2.Reserved = field(default_factory=decode_pb2.Reserved)
    tokens: decode_pb2.Tokens = field(default_factory=decode_pb2.Tokens)
    finished: decode_pb2.Finished = field(default_factory=decode_pb2.Finished)


class LinkedCall:
    """Iterates over the events of the request. Raises the HeadraceError with which it ends."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        request: decode_pb2.GenerateRequest,
        timeout_s: float | None = None,
    ) -> None:
        timeout = None if timeout_s is None else duration_from_seconds(timeout_s)
        opened = decode_pb2.LinkOpen(
            stream_id=1, request=request, timeout=timeout, credit_tokens=_CREDIT_TOKENS
        )
        self._opened = decode_pb2.LinkRequest(opens=[opened])
        self._call: Any = decode_pb2_grpc.DecodeServiceStub(channel).Link(self._requests())
        self._events: deque[LinkedEvent | HeadraceError] = deque()
        self._is_finished = False

    async def _requests(self) -> AsyncIterator[decode_pb2.LinkRequest]:
        yield self._opened

    def __aiter__(self) -> LinkedCall:
        return self

    async def __anext__(self) -> LinkedEvent:
        while not self._events:
            if self._is_finished:
                # A link outlives its requests.
                self.cancel()
                raise StopAsyncIteration
            try:
                message = await self._call.read()
            except grpc.aio.AioRpcError as error:
                raise error_from_rpc(error) from error
            if message is grpc.aio.EOF:
                raise StopAsyncIteration
            self._add(message)
        event = self._events.popleft()
        if isinstance(event, HeadraceError):
            raise event
        return event

    def cancel(self) -> None:
        """Ends the link, and with it the request."""
        self._call.cancel()

    def _add(self, message: decode_pb2.LinkResponse) -> None:
        self._events.extend(
            LinkedEvent("reserved", reserved=one.reserved) for one in message.reserved
        )
        if message.tokens.token_ids:
            tokens = decode_pb2.Tokens(token_ids=message.tokens.token_ids)
            self._events.append(LinkedEvent("tokens", tokens=tokens))
        self._events.extend(
            LinkedEvent("tokens", tokens=one.tokens) for one in message.tokens_with_logprobs
        )
        self._events.extend(
            LinkedEvent("finished", finished=one.finished) for one in message.finished
        )
        self._events.extend(error_from_status(one.status) for one in message.failures)
        self._is_finished = bool(message.finished)
